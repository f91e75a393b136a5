"""Law L7: all-to-alls of fixed sizes (`--moe-expert-rank-capacity-factor`) change no bit of what
they have room for.

The layouts of L1 have rows with it in `test_every_axis.py`, L10 in `test_host_syncs.py`.
"""

from typing import Any

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.test_every_axis import BIASED, EXPERTS, OPTIM, SP, TURNS
from tests.laws.worlds import Case, Outcome, train_here

FULL, SOME = (
    {"recompute_granularity": "full"},
    {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
)
FACTOR = "moe_expert_rank_capacity_factor"
CAPACITY = EXPERTS | {"moe_expert_capacity_factor": 1.0}
BATCH = {"micro_batch_size": 1, "global_batch_size": 8}
# name -> ranks, sizes, options, fields of the model and of other sections
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "turns": (2, {"ep": 2}, TURNS, EXPERTS, {"memory": SOME}),
    "fp8": (
        2,
        {"ep": 2},
        {},
        EXPERTS | {"hidden_size": 64},
        {"precision": {"fp8_format": "hybrid"}},
    ),
    "capacity": (2, {"ep": 2}, {}, CAPACITY, {}),
    "every rank has another expert": (
        4,
        {"ep": 4, "strategy": "optim_grads"},
        {},
        EXPERTS,
        {"memory": FULL},
    ),
    "sequences": (4, {"tp": 2, "etp": 1, "ep": 2}, SP, BIASED, {"memory": SOME}),
    "shared experts": (
        4,
        {"tp": 2, "etp": 2, "ep": 2},
        SP,
        EXPERTS | {"add_bias_linear": True},
        {},
    ),
}


def case_of(name: str, **options: Any) -> tuple[int, dict[str, Any], Case]:
    """Ranks, sizes and case of a layout."""
    ranks, sizes, parallel, model, sections = LAYOUTS[name]
    parallel = {SHORT_NAMES[key]: value for key, value in sizes.items()} | parallel | options
    # Of this width a tensor of any number of tokens has no end that the CPU computes with other
    # instructions.
    model = model | {"moe_ffn_hidden_size": 64}
    return (
        ranks,
        sizes,
        Case(2).but(train=BATCH, optim=OPTIM, parallel=parallel, model=model, **sections),
    )


def train_both(ctx: ParallelContext, case: Case, factor: float) -> tuple[Outcome, Outcome]:
    return train_here(ctx, case), train_here(ctx, case.but(parallel={FACTOR: factor}))


@pytest.mark.parametrize("name", LAYOUTS)
def test_padded_all_to_alls_change_no_bit(name: str) -> None:
    ranks, sizes, case = case_of(name)
    for exact, padded in run_ranks(ranks, train_both, case, 1.9, **sizes, shares=True):
        assert padded.losses == exact.losses and padded.grad_norms == exact.grad_norms
        assert padded.moe == exact.moe
        assert all(torch.equal(exact.weights[box], padded.weights[box]) for box in exact.weights)
