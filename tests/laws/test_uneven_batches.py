"""Law L1 where the ranks do not divide the microbatches: padding counts neither in the loss nor in
a router.

A global batch of 12 samples on 3 data-parallel ranks, 3 samples per microbatch: in the second
microbatch one rank has samples and two have padding. With experts on all ranks the three exchange
tokens in it.
"""

from typing import Any

import pytest

from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.worlds import GLOBAL_BATCH, Case, Outcome, train_here

STEPS, OPTIM, MICRO_BATCH = 2, {"lr": 3e-3, "adam_eps": 1e-5}, 3
# Every term of a router: expert bias, two balance losses that do not depend on the ranks, z-loss
# and capacity.
EXPERTS = {
    "num_experts": 6,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 22,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.4],
    "moe_z_loss_coeff": 1e-2,
    "moe_expert_capacity_factor": 1.25,
}
SP = {"sequence_parallel": True}

# ranks, sizes of axes, options
ROWS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (3, {"strategy": "optim"}, {}),
    (3, {"ep": 3, "strategy": "optim_grads_params"}, {"overlap_grad_reduce": True}),
    (6, {"tp": 2, "etp": 1, "ep": 3, "strategy": "optim"}, SP),
]


def case_of(options: dict[str, Any]) -> Case:
    return Case(STEPS).but(
        model=EXPERTS, optim=OPTIM, train={"micro_batch_size": MICRO_BATCH}, parallel=options
    )


@pytest.fixture(scope="module")
def single() -> list[Outcome]:
    return run_ranks(1, train_here, case_of({}), shares=True)


@pytest.mark.parametrize(("num_ranks", "sizes", "options"), ROWS, ids=str)
def test_padded_microbatches_of_experts_change_nothing(
    single: list[Outcome], num_ranks: int, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
    outcomes = run_ranks(num_ranks, train_here, case_of(parallel), **sizes, shares=True)
    num_padded = -GLOBAL_BATCH % (3 * MICRO_BATCH)
    assert num_padded == 6
    assert_alike(outcomes, single, row=f"{sizes}", lr=OPTIM["lr"], num_padded=num_padded)
    for step, (metrics, expected) in enumerate(zip(outcomes[0].moe, single[0].moe, strict=True)):
        assert metrics["load"] == expected["load"] and expected["load"], f"step {step}"
        for name in ("dropped", "entropy", "balance_loss", "z_loss"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4), f"step {step}: {name}"
