"""Law L1 for Sinkhorn routing: layouts choose the experts of one rank, and have its weights. Law L5:
they gather the planned bytes, with a capacity of the experts too.
"""

from functools import cache
from typing import Any

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.plan.traffic import sent_bytes
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.test_every_axis import EXPERTS, SP
from tests.laws.worlds import (
    GLOBAL_BATCH,
    Case,
    Outcome,
    build_here,
    micro_batch_size,
    outcome_of,
    train_steps,
)

LR, STEPS = 3e-3, 2
SINKHORN = EXPERTS | {
    "moe_router_topk": 1,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": ["sinkhorn"],
    "moe_aux_loss_coeff": [0.0],
}
Layout = tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]
LAYOUTS: list[Layout] = [
    (2, {"ep": 2, "strategy": "optim_grads"}, {}, {}),
    (2, {"cp": 2, "strategy": "optim"}, {}, {}),
    (2, {"pp": 2, "strategy": "optim"}, {}, {"recompute_granularity": "full"}),
    (4, {"tp": 2, "etp": 1, "ep": 2, "strategy": "optim"}, SP, {}),
]


def case_of(layout: Layout | None) -> Case:
    case = Case(STEPS).but(optim={"lr": LR, "adam_eps": 1e-5}, model=SINKHORN)
    if layout is None:
        return case.but(train={"micro_batch_size": GLOBAL_BATCH})
    num_ranks, sizes, options, memory = layout
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
    train = {"micro_batch_size": micro_batch_size(num_ranks, sizes)}
    return case.but(parallel=parallel, train=train, memory=memory)


GATHERS = ("tp_cp", "all_gather")


def train_here(ctx: ParallelContext, case: Case) -> tuple[Outcome, int, int]:
    """The outcome, and the bytes that the ranks of a sequence gathered: sent and planned."""
    run = build_here(ctx, case)
    ctx.traffic.reset()
    outcome = outcome_of(run, train_steps(run, case.steps))
    planned = case.steps * sent_bytes(run.plan).get(GATHERS, 0)
    return outcome, ctx.traffic.bytes(*GATHERS), planned


@cache
def single_rank() -> Outcome:
    return run_ranks(1, train_here, case_of(None), shares=True)[0][0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_trains_as_one_rank(layout: Layout) -> None:
    num_ranks, sizes, _, _ = layout
    results = run_ranks(num_ranks, train_here, case_of(layout), **sizes, shares=True)
    outcomes = [outcome for outcome, _, _ in results]
    assert_alike(outcomes, [single_rank()], row=str(layout), lr=LR)
    is_sharded = sizes.get("tp", 1) * sizes.get("cp", 1) > 1
    for _, sent, planned in results:
        assert sent == planned and (sent > 0) == is_sharded


@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_sequence_gathers_the_planned_bytes_with_a_capacity_too(recompute: str | None) -> None:
    layout = (2, {"cp": 2, "strategy": "optim"}, {}, {"recompute_granularity": recompute})
    case = case_of(layout).but(model={"moe_expert_capacity_factor": 1.0})
    for _, sent, planned in run_ranks(2, train_here, case, **layout[1], shares=True):
        assert sent == planned > 0
