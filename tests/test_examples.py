"""Every example runs as its docstring says and prints what it promises."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# name -> arguments before the file, and lines that must appear
PROMISES = {
    "my_own_schedule.py": ([], ["bubble    1/3 = 33.3%", "bubble    1/5 = 20.0%", "same gradient: True"]),
    "new_model.py": ([], ["vocabulary of 30 padded to 128"]),
    "plan_a_cluster.py": ([], ["  8   1   16       54.2", " 16   1    8       30.1   tp crosses nodes"]),
    "zero_by_hand.py": (TORCHRUN, ["2 ranks, each keeps gradients for", "same weights on every rank: True"]),
}


@functools.cache
def run_example(name: str) -> str:
    launcher, _ = PROMISES[name]
    command = [sys.executable, *launcher, str(ROOT / "examples" / name)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PROMISES)
def test_an_example_prints_what_it_promises(name: str) -> None:
    output = run_example(name)

    for line in PROMISES[name][1]:
        assert line in output


def test_the_new_model_repeats_what_it_was_told() -> None:
    output = run_example("new_model.py")

    told = output.split("told")[1].splitlines()[0].strip()
    assert output.split("repeated")[1].strip() == told


def test_every_example_is_listed_and_fits_on_a_page() -> None:
    assert {path.name for path in EXAMPLES} == set(PROMISES)
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 80, f"{path.name} is longer than 80 lines"
