"""torchrun --max-restarts: a killed rank costs the steps since the last save and changes no value."""

import re
from pathlib import Path

from nanotrain.watch.watchdog import REPORT
from tests.harness import run_ranks
from tests.laws.command_line import arguments, assert_same_to_the_bit, run_command_lines, start_torchrun, wait_for

# What nanotrain.train is, but rank 1 kills itself in its first life, at the beginning of step 6.
MORTAL = """
import os, signal
from nanotrain.system import run_program
from nanotrain.train import main as entry
from nanotrain.train import fit as trainer
train_step = trainer.train_step
def die_in_step_6(run, batch, **options):
    if run.context.rank == 1 and run.state.step == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(run, batch, **options)
trainer.train_step = die_in_step_6
run_program(entry.main)
"""
FLAGS = "--train-iters 8 --save-interval 4 --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce"


def test_a_run_with_a_killed_rank_is_started_again_by_torchrun_and_ends_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    program = tmp_path / "mortal.py"
    program.write_text(MORTAL)
    line = arguments(tmp_path / "run", FLAGS)
    started = start_torchrun(line, program=[str(program)], options=["--max-restarts", "1"])
    run_ranks(2, run_command_lines, arguments(tmp_path / "reference", FLAGS))
    finished = wait_for(started)
    assert finished.exit_code == 0, finished.output
    assert "(exitcode: -9) local_rank: 1" in finished.output, "a rank was killed"
    says = r"rank 1 \(dp1, host \S+, pid \d+\) ended without an error"
    assert re.search(f"error: .*{says}", finished.output, re.DOTALL), finished.output
    assert re.search(says, (tmp_path / "run" / REPORT).read_text())
    assert "step-00000004: step 4, 48 samples consumed" in finished.output, "and the run resumed"
    assert_same_to_the_bit(tmp_path / "run", tmp_path / "reference")
