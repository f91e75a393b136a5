"""Every example prints what is expected, on ranks that have imported torch: at a fifth of
torchrun's CPU time.
"""

import functools
import runpy
import sys
import tempfile
from pathlib import Path

import pytest

from tests.laws.command_line import ForkedRanks

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# name -> number of ranks, and lines that must appear
EXPECTED = {
    "clean_with_datatrove.py": (1, ["web.bin: 2 documents, 56 tokens, vocabulary 257"]),
    "my_own_schedule.py": (
        1,
        ["1/3 = 33.3% of the time", "1/5 = 20.0% of the time", "same gradient: True"],
    ),
    "new_model.py": (1, ["vocabulary of 30 padded to 128"]),
    "pretrain_gpt.py": (2, ["step 2/2", "flags name what nanotrain always does"]),
    "plan_a_cluster.py": (
        1,
        ["  8   1   16       54.2", " 16   1    8       30.1   tp crosses nodes"],
    ),
    "settings_chat.py": (1, ["data/settings.jsonl: ", "data/settings_task.jsonl: 40 rows"]),
    "shard_any_model.py": (2, ["2 ranks, each keeps", "same loss after loading: True"]),
    "zero_by_hand.py": (2, ["rank 0 of 2 keeps gradients for", "same weights on every rank: True"]),
}
NEEDED = {"clean_with_datatrove.py": ("datatrove", "orjson")}  # further packages of an example
ARGUMENTS = {
    "settings_chat.py": f"{ROOT / 'docs' / 'config.md'} data",
    # what Megatron-LM's own script takes
    "pretrain_gpt.py": "--use-mcore-models --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --train-samples 8 --lr 1e-3 "
    "--lr-decay-style cosine --lr-warmup-fraction .5 --clip-grad 1.0 --mock-data --vocab-size 260 --split 949,50,1 "
    "--use-distributed-optimizer --tensor-model-parallel-size 1 --transformer-impl local --no-bias-gelu-fusion "
    "--log-interval 1 --eval-interval 1000 --eval-iters 0 --save ck --load ck --manual-gc --distributed-backend gloo",
}


@functools.cache
def run_example(name: str) -> str:
    for package in NEEDED.get(name, ()):
        pytest.importorskip(package)
    num_ranks, _ = EXPECTED[name]
    program, line = ROOT / "examples" / name, ARGUMENTS.get(name, "").split()
    with tempfile.TemporaryDirectory() as folder:
        finished = ForkedRanks(
            line, folder=Path(folder), num_ranks=num_ranks, program=program
        ).wait()
    assert finished.exit_code == 0, finished.output
    return finished.output


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_prints_the_expected_lines(name: str) -> None:
    output = run_example(name)

    for line in EXPECTED[name][1]:
        assert line in output


def test_the_new_model_repeats_its_prompt() -> None:
    output = run_example("new_model.py")

    prompt = output.split("prompt")[1].splitlines()[0].strip()
    assert output.split("repeated")[1].strip() == prompt


def test_every_example_is_listed_and_fits_on_a_page() -> None:
    assert {path.name for path in EXAMPLES} == set(EXPECTED)
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 100, f"{path.name} is longer than 100 lines"


@pytest.mark.parametrize("name", NEEDED)
def test_an_example_without_its_packages_is_one_message(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in NEEDED[name]:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no package ") and "pip install datatrove orjson" in line
