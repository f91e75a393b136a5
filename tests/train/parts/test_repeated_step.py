"""A step whose loss is not finite is taken again; a transient fault leaves no trace in weights."""

import logging
from typing import Any

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.train.parts import repeated_step
from nanotrain.train.step import train_step_with_repeats
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.test_sparse_attention import DSA
from tests.laws.worlds import (
    GLOBAL_BATCH,
    Case,
    build_here,
    held_weights,
    micro_batch_size,
    train_steps,
)
from tests.train.parts.test_losses import read_blend

STEPS = 2
Weights = dict[Any, torch.Tensor]
DP: dict[str, Any] = {"strategy": "optim"}
PP: dict[str, Any] = {"pp": 2, "strategy": "no_shard"}


def case_of(sizes: dict[str, Any]) -> Case:
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()}
    train = {"rerun_mode": "validate_results", "micro_batch_size": micro_batch_size(2, sizes)}
    return Case(STEPS).but(train=train, parallel=parallel)


class _Messages(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train_with_faults(
    ctx: ParallelContext, case: Case, faulty: tuple[int, ...]
) -> tuple[list[dict[str, Any]], Weights, list[str]]:
    """Train with NaN in some forward passes of the last layer on rank 1, counted from 0.

    Returns:
        metrics and `skipped` of every step, the weights, and what was logged.
    """
    run = build_here(ctx, case)
    handler = _Messages()
    repeated_step.log.addHandler(handler)
    passes = iter(range(1000))

    def spoil(module: Any, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.nan if next(passes) in faulty else hidden

    if ctx.rank == 1:
        blocks = dict(run.stages[max(run.stages)].named_modules())
        blocks["layers.1"].register_forward_hook(spoil)
    outputs = []
    for _ in range(case.steps):
        batch = run.batch_iterator.next()
        assert batch is not None
        output = train_step_with_repeats(run, batch)
        outputs.append({**output.metrics, "skipped": output.skipped})
    repeated_step.log.removeHandler(handler)
    assert run.state.step == case.steps
    return outputs, held_weights(run), handler.texts


def train_without(ctx: ParallelContext, case: Case) -> Weights:
    run = build_here(ctx, case)
    train_steps(run, case.steps)
    return held_weights(run)


def initial_weights(ctx: ParallelContext, case: Case) -> Weights:
    return held_weights(build_here(ctx, case))


def names_of_parts(ctx: ParallelContext, case: Case) -> list[str]:
    return list(build_here(ctx, case).parts.by_name)


@pytest.mark.parametrize("sizes", [DP, PP], ids=["dp", "pp"])
def test_a_transient_fault_leaves_no_trace(sizes: dict[str, Any]) -> None:
    expected = run_ranks(2, train_without, case_of(sizes), **sizes, shares=True)
    results = run_ranks(2, train_with_faults, case_of(sizes), (0,), **sizes, shares=True)
    for (outputs, weights, _), before in zip(results, expected, strict=True):
        assert [output.get("repeated", 0) for output in outputs] == [1, 0]
        assert not any(output["skipped"] for output in outputs)
        assert all(torch.equal(weights[box], before[box]) for box in before)
    (text,) = results[0][2]
    assert text.startswith("the loss was not finite on rank 1, and is in a repetition")
    assert "a transient fault of the hardware" in text


def test_a_fault_that_repeats_skips_the_step() -> None:
    every_pass = tuple(range(1000))
    results = run_ranks(2, train_with_faults, case_of(DP), every_pass, **DP, shares=True)
    start = run_ranks(2, initial_weights, case_of(DP), **DP, shares=True)
    for (outputs, weights, _), before in zip(results, start, strict=True):
        assert all(output["skipped"] and output["loss_not_finite"] for output in outputs)
        assert [output["repeated"] for output in outputs] == [1, 1]
        assert all(torch.equal(weights[box], before[box]) for box in before)
    assert all("on rank 1, and is not in a repetition" in text for text in results[0][2])
    assert len(results[0][2]) == STEPS


def test_without_the_setting_no_step_waits_for_the_host() -> None:
    assert "repeated_step" not in run_ranks(1, names_of_parts, Case(1), shares=True)[0]


SPARSE = Case(STEPS).but(
    model=DSA,
    train={
        "rerun_mode": "validate_results",
        "micro_batch_size": GLOBAL_BATCH,
        "log_max_attention_logit": True,
    },
)


def logged_with_fault(ctx: ParallelContext, faulty: int | None) -> dict[str, Any]:
    """The metrics of the last step, which alone is logged; NaN in one pass of the first layer."""
    run = build_here(ctx, SPARSE)
    read_blend(ctx, run)
    passes = iter(range(1000))

    def spoil(module: Any, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.nan if next(passes) == faulty else hidden

    dict(run.stages[0].named_modules())["layers.0"].register_forward_hook(spoil)
    metrics: dict[str, Any] = {}
    for step in range(STEPS):
        batch = run.batch_iterator.next()
        assert batch is not None
        is_last = step + 1 == STEPS
        metrics = train_step_with_repeats(run, batch, is_logged=is_last).metrics
    return metrics


@pytest.mark.parametrize("faulty", range(STEPS), ids=["before the logged step", "in it"])
def test_what_is_collected_until_a_step_is_logged_has_the_repetition_alone(faulty: int) -> None:
    (expected,) = run_ranks(1, logged_with_fault, None, shares=True)
    (found,) = run_ranks(1, logged_with_fault, faulty, shares=True)
    for name in ("dsa_indexer_loss", "max_attention_logit", "source_losses"):
        assert name in expected
        assert found[name] == expected[name], name
