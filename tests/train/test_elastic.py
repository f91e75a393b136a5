"""Restarts on other numbers of ranks: the same global batches in the same order, so the same
losses.
"""

from pathlib import Path

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.train.hooks.checkpoint import CheckpointHook
from tests.harness import run_ranks
from tests.train.small_run import Spy, small_run, train

BATCH = ("--global-batch-size", "8", "--train-iters", "6", "--exit-interval", "3", "--seed", "3")
SHARDED = ("--data-parallel-sharding-strategy", "optim_grads", "--overlap-grad-reduce")
SHARDED_GROUPS = {"strategy": "optim_grads"}


def results_of(spy: Spy) -> list[tuple[float, float]]:
    return [(report.output.loss, report.output.grad_norm) for report in spy.reports]


def train_part(ctx: ParallelContext | None, folder: str, *flags: str) -> list[tuple[float, float]]:
    spy = Spy()
    with small_run(Path(folder), *BATCH, *flags, context=ctx) as run:
        train(run, CheckpointHook(), spy)
        assert run.state.consumed_samples == 8 * run.state.step
        assert len(spy.reports) == 3 and {
            report.consumed_tokens % 128 for report in spy.reports
        } == {0}
    return results_of(spy)


def test_losses_on_ranks_that_do_not_divide_the_batch_are_those_of_one_rank(tmp_path, logged):
    expected = [result for _ in range(2) for result in train_part(None, str(tmp_path / "one"))]
    parts = run_ranks(3, train_part, str(tmp_path / "elastic"), *SHARDED, **SHARDED_GROUPS)
    assert parts[0] == parts[1] == parts[2]
    results = parts[0] + train_part(None, str(tmp_path / "elastic"))
    for result, reference in zip(results, expected, strict=True):
        assert result == pytest.approx(reference, rel=1e-5)


def test_an_unset_batch_that_changes_with_the_ranks_is_said(tmp_path, logged):
    with small_run(tmp_path, "--train-iters", "1", "--global-batch-size", "2") as run:
        train(run, CheckpointHook())
    with small_run(tmp_path, "--train-iters", "2"):
        pass
    assert any("train.global_batch_size 2 -> 1" in line for line in logged)
