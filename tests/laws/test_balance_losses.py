"""Law L1 for the load-balancing losses: their sums over ranks and microbatches are those of one rank.

The loss of a microbatch depends on how many samples it has, and the one over all ranks on how many microbatches precede
it. One rank with the same microbatches is the reference: `micro_batch_size` of the row, or times its dp.
"""

from typing import Any

import pytest

from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.worlds import Case, train_here

STEPS, OPTIM = 3, {"lr": 3e-3, "adam_eps": 1e-5}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
ALL = {
    "moe_router_load_balancing_type": ["global_aux_loss", "seq_aux_loss", "aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.3, 0.4],
}
MICROBATCH = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.5]}
GLOBAL = {"moe_router_load_balancing_type": ["global_aux_loss"], "moe_aux_loss_coeff": [0.5]}
SP = {"sequence_parallel": True}

# losses, ranks, sizes of axes, options, samples per microbatch of a rank and of the reference
ROWS: list[tuple[dict[str, Any], int, dict[str, Any], dict[str, Any], int, int]] = [
    (ALL, 4, {"tp": 2, "cp": 2, "etp": 1, "ep": 2}, SP, 3, 3),
    (ALL, 4, {"tp": 2, "pp": 2, "etp": 1, "strategy": "optim"}, {}, 2, 2),
    (MICROBATCH, 4, {"cp": 2, "ep": 2, "strategy": "optim_grads"}, {"overlap_grad_reduce": True}, 3, 3),
    (GLOBAL, 4, {"pp": 2, "ep": 2, "strategy": "optim"}, {"pipeline_schedule": "zb-h1"}, 2, 4),
    (GLOBAL, 4, {"tp": 2, "etp": 1, "ep": 2, "strategy": "optim_grads_params"}, SP, 1, 2),
]


@pytest.mark.parametrize(("losses", "num_ranks", "sizes", "options", "micro_batch", "reference"), ROWS, ids=str)
def test_load_balancing_losses_are_those_of_one_rank(
    losses: dict[str, Any],
    num_ranks: int,
    sizes: dict[str, Any],
    options: dict[str, Any],
    micro_batch: int,
    reference: int,
) -> None:
    case = Case(STEPS).but(model=EXPERTS | losses, optim=OPTIM, train={"micro_batch_size": reference})
    single = run_ranks(1, train_here, case)
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
    case = case.but(train={"micro_batch_size": micro_batch}, parallel=parallel)
    outcomes = run_ranks(num_ranks, train_here, case, **sizes)
    assert_alike(outcomes, single, row=f"{losses} {sizes}", lr=OPTIM["lr"])
