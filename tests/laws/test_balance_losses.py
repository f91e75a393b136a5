"""Law L1 for the load-balancing losses: their sums over ranks and microbatches are those of one
rank.

The loss of a microbatch depends on how many samples it has, and the one over all ranks on how many
microbatches precede it. One rank with the same microbatches is the reference: `micro_batch_size` of
the row, or times its dp.

What one rank shares with every layout: losses that are not scaled with the model's in fp16. There
fp32 is the reference, where nothing is scaled; two initial scales give the same gradients but for
rounding.
"""

from typing import Any

import pytest
from torch import Tensor

from nanotrain.comm.parallel_context import ParallelContext
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.worlds import Case, build_here, train_here, train_steps

STEPS, OPTIM = 3, {"lr": 3e-3, "adam_eps": 1e-5}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
ALL = {
    "moe_router_load_balancing_type": ["global_aux_loss", "seq_aux_loss", "aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.3, 0.4],
}
MICROBATCH = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.5]}
GLOBAL = {"moe_router_load_balancing_type": ["global_aux_loss"], "moe_aux_loss_coeff": [0.5]}
# as in Megatron-LM
DIVIDED = GLOBAL | {"moe_aux_loss_coeff": [1.0], "moe_divide_global_aux_loss_by_dp": True}
SP = {"sequence_parallel": True}

# losses, ranks, sizes of axes, options, samples per microbatch of a rank and of the reference
ROWS: list[tuple[dict[str, Any], int, dict[str, Any], dict[str, Any], int, int]] = [
    (ALL, 4, {"tp": 2, "cp": 2, "etp": 1, "ep": 2}, SP, 3, 3),
    (ALL, 4, {"tp": 2, "pp": 2, "etp": 1, "strategy": "optim"}, {}, 2, 2),
    (
        MICROBATCH,
        4,
        {"cp": 2, "ep": 2, "strategy": "optim_grads"},
        {"overlap_grad_reduce": True},
        3,
        3,
    ),
    (GLOBAL, 4, {"pp": 2, "ep": 2, "strategy": "optim"}, {"pipeline_schedule": "zb-h1"}, 2, 4),
    (DIVIDED, 4, {"tp": 2, "etp": 1, "ep": 2, "strategy": "optim_grads_params"}, SP, 1, 2),
]


@pytest.mark.parametrize(
    ("losses", "num_ranks", "sizes", "options", "micro_batch", "reference"), ROWS, ids=str
)
def test_load_balancing_losses_are_those_of_one_rank(
    losses: dict[str, Any],
    num_ranks: int,
    sizes: dict[str, Any],
    options: dict[str, Any],
    micro_batch: int,
    reference: int,
) -> None:
    case = Case(STEPS).but(
        model=EXPERTS | losses, optim=OPTIM, train={"micro_batch_size": reference}
    )
    # by 2 ranks
    single = run_ranks(
        1, train_here, case.but(model=GLOBAL) if losses is DIVIDED else case, shares=True
    )
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
    case = case.but(train={"micro_batch_size": micro_batch}, parallel=parallel)
    outcomes = run_ranks(num_ranks, train_here, case, **sizes, shares=True)
    assert_alike(outcomes, single, row=f"{losses} {sizes}", lr=OPTIM["lr"])


SCALED = ALL | {"moe_z_loss_coeff": 0.1, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.8}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"params_dtype": "fp16", "initial_loss_scale": 2.0**9},
    "fp16, 16 times the scale": {"params_dtype": "fp16", "initial_loss_scale": 2.0**13},
}


def gradients(
    ctx: ParallelContext, cases: list[Case]
) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """The gradient of every parameter in the first step of each case, and what it reports."""
    found = []
    for case in cases:
        run = build_here(ctx, case)
        (result,) = train_steps(run, 1)
        assert not result.skipped
        numbers = {"loss": result.loss, "grad_norm": result.grad_norm} | result.metrics["norms"][
            "grad"
        ]
        grads = {box.name: grad.clone() for box, grad in run.optimizer.grad_tensors().items()}
        found.append((grads, numbers | {"mtp_loss": result.metrics["mtp_losses"][0]}))
    return found


def test_no_gradient_depends_on_the_loss_scale() -> None:
    train = {"micro_batch_size": 3, "log_norms_by_group": True}
    case = Case(1).but(model=EXPERTS | SCALED, optim=OPTIM | {"clip_grad": 0.0}, train=train)
    cases = [case.but(precision=precision) for precision in PRECISIONS.values()]
    (((expected, numbers), *others),) = run_ranks(1, gradients, cases, shares=True)
    for grads, found in others:
        assert found == pytest.approx(numbers, rel=1e-2)
        for name, grad in expected.items():
            off = (grads[name] - grad).norm() / grad.norm()
            assert off < 0.02, f"{name} is off by {off:.1%}"
    assert others[0][1] == pytest.approx(others[1][1], rel=1e-3)
