"""A step with more tokens for a rank than all-to-alls of fixed sizes have room for is skipped and
named.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.train.parts.rank_capacity import RankCapacity
from nanotrain.train.step import train_step_with_repeats
from tests.harness import run_ranks
from tests.laws.test_rank_capacity import FACTOR, case_of, train_both
from tests.laws.worlds import (
    Case,
    Outcome,
    build_here,
    held_weights,
    outcome_of,
    train_here,
    train_steps,
)


def train_over_capacity(ctx: ParallelContext, case: Case) -> dict[str, Any]:
    """The metrics of a step that is skipped and changes nothing."""
    run = build_here(ctx, case)
    buffers = {
        name: each.clone() for stage in run.stages.values() for name, each in stage.named_buffers()
    }
    before = held_weights(run)
    (step,) = train_steps(run, 1)
    assert all(torch.equal(before[box], weight) for box, weight in held_weights(run).items())
    biases = [
        (each, buffers[name])
        for stage in run.stages.values()
        for name, each in stage.named_buffers()
    ]
    part = run.parts.by_name["rank_capacity"]
    assert isinstance(part, RankCapacity) and len(part.dispatchers) == 2
    assert all(dispatcher.peak is None for dispatcher in part.dispatchers.values()), (
        "the next step counts anew"
    )
    assert step.skipped and all(torch.equal(*pair) for pair in biases), "expert biases stay too"
    # which has no numbers
    return {key: value for key, value in step.metrics.items() if key != "moe"}


def test_a_step_with_more_tokens_for_a_rank_is_skipped_and_named_with_the_factor_that_it_needs() -> (
    None
):
    ranks, sizes, case = case_of("sequences", **{FACTOR: 1.0})
    results = run_ranks(ranks, train_over_capacity, case, **sizes, shares=True)
    metrics = results[0]
    assert all(result == metrics for result in results[1:])
    # 12 tokens of a sequence on a tp rank choose 2 experts each, so 12 pairs are an even share of 2
    # ranks
    needed, text = metrics["moe_rank_capacity_factor"], metrics["skip_reason"]
    most = int(needed * 12)
    assert 12 < most <= 24 and f" had {most} tokens for a rank of ep that takes 12: " in text
    assert text.startswith("layers.0.mlp of rank ")
    assert text.endswith(f"set --moe-expert-rank-capacity-factor {needed} or more")
    # Layers after the first one with too many tokens had no numbers to route.
    (metrics, *_) = run_ranks(
        ranks, train_over_capacity, case.but(parallel={FACTOR: needed}), **sizes, shares=True
    )
    assert metrics["skip_reason"].startswith("layers.1.mlp of rank ")
    needed = metrics["moe_rank_capacity_factor"]
    case = replace(case.but(parallel={FACTOR: None}), steps=1)
    for exact, padded in run_ranks(ranks, train_both, case, needed, **sizes, shares=True):
        assert padded.losses == exact.losses and padded.grad_norms == exact.grad_norms


def repeat_over_capacity(ctx: ParallelContext, case: Case) -> tuple[Outcome, Outcome, list[Any]]:
    """Two steps with exact sizes, and two that are repeated; what the metrics say of these."""
    exact = train_here(ctx, case.but(parallel={FACTOR: None}))
    run = build_here(ctx, case)
    steps = []
    for _ in range(case.steps):
        batch = run.batch_iterator.next()
        assert batch is not None
        steps.append(train_step_with_repeats(run, batch))
    assert run.state.step == case.steps
    sizes = [(step.skipped, step.metrics.get("moe_exact_sizes")) for step in steps]
    return exact, outcome_of(run, steps), sizes


DELAYED = {
    "params_dtype": "bf16",
    "fp8_format": "hybrid",
    "fp8_amax_history_len": 3,
    "fp8_amax_compute_algo": "max",
}
PRECISIONS = {
    "fp32": {},
    "fp16": {"params_dtype": "fp16", "initial_loss_scale": 1024.0, "hysteresis": 1},
    "fp8 delayed": DELAYED,
    "fp8 gathers": DELAYED | {"fp8_amax_compute_algo": "most_recent", "fp8_param_gather": True},
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_step_over_the_capacity_is_repeated_to_the_bits_of_exact_sizes(name: str) -> None:
    """With the loss scale and the amax histories of a step that is taken once."""
    ranks, sizes, case = case_of("fp8" if "fp8" in name else "sequences", **{FACTOR: 1.0})
    case = case.but(precision=PRECISIONS[name])
    for exact, repeated, results in run_ranks(
        ranks, repeat_over_capacity, case, **sizes, shares=True
    ):
        assert results == [(False, 1)] * case.steps
        assert repeated.losses == exact.losses and repeated.grad_norms == exact.grad_norms
        assert repeated.moe == exact.moe
        assert all(torch.equal(exact.weights[box], repeated.weights[box]) for box in exact.weights)
