"""torchrun --max-restarts: a killed rank costs the steps since the last save and changes no value."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nanotrain.runs.failures import read_hang
from nanotrain.train import fit as trainer
from nanotrain.train import main as entry
from nanotrain.watch import watchdog
from tests.harness import forkserver, run_ranks
from tests.laws.command_line import arguments, assert_same_to_the_bit, run_command_lines

FLAGS = "--train-iters 8 --save-interval 4 --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce"


def train_mortally(line: list[str]) -> None:
    """Train, but rank 1 kills itself in its first life, at the beginning of step 6."""
    train_step = trainer.train_step_with_repeats

    def die_in_step_6(run: Any, batch: Any, **options: Any) -> Any:
        if (
            run.context.rank == 1
            and run.state.step == 5
            and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(run, batch, **options)

    trainer.train_step_with_repeats = die_in_step_6
    watchdog.GRACE_S = 0.5
    if code := entry.main(line):
        os._exit(code)


def train_with_restarts(line: list[str], folder: Path) -> str:
    """Train on two ranks under torchrun's agent, which starts them again once; the output of both
    lives.

    The agent is in this process and the ranks are forked with their imports done: an eighth of
    torchrun's CPU time.
    """
    forkserver()
    logs = DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL)
    standalone = {
        "min_nodes": 1,
        "max_nodes": 1,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
    }
    config = LaunchConfig(
        **standalone,
        nproc_per_node=2,
        max_restarts=1,
        start_method="forkserver",
        run_id="restart",
        logs_specs=logs,
    )
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        elastic_launch(config, train_mortally)(line)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return "".join(file.read_text() for file in sorted(folder.rglob("std*.log")))


def test_a_run_with_a_killed_rank_is_started_again_by_torchrun_and_ends_as_if_nothing_had_happened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = train_with_restarts(arguments(tmp_path / "run", FLAGS), tmp_path / "logs")
    run_ranks(2, run_command_lines, arguments(tmp_path / "reference", FLAGS))
    assert "(exitcode: -9) local_rank: 1" in caplog.text, "a rank was killed"
    says = r"rank 1 \(dp1, host \S+, pid \d+\) ended without an error"
    assert re.search(f"error: .*{says}", output, re.DOTALL), output
    assert re.search(says, (tmp_path / "run" / watchdog.REPORT).read_text())
    (lost,) = read_hang(tmp_path / "run").ranks
    assert (lost.rank, lost.state) == (1, "lost")
    assert "step-00000004: step 4, 48 samples consumed" in output, "and the run resumed"
    assert_same_to_the_bit(tmp_path / "run", tmp_path / "reference")
