"""Law L1 for quantile balancing: the biases of all layouts are those of one rank, and the weights."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.train.run import Run
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.test_any_topology import save_step
from tests.laws.test_every_axis import EXPERTS, SP, ZB
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
QUANTILES = EXPERTS | {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": ["quantile_balancing"],
    "moe_router_quantile_balancing_ema": 0.25,
    "moe_router_qb_num_bins": 50,
    "moe_aux_loss_coeff": [0.0],
}
Layout = tuple[int, dict[str, Any], dict[str, Any]]
LAYOUTS: list[Layout] = [
    (2, {"strategy": "no_shard"}, {}),
    (2, {"ep": 2, "strategy": "optim_grads_params"}, {}),
    (2, {"cp": 2, "strategy": "optim_grads"}, {}),
    (2, {"pp": 2, "strategy": "optim"}, ZB),
    (4, {"tp": 2, "etp": 2, "strategy": "optim"}, {}),
    (4, {"tp": 2, "etp": 1, "ep": 2, "strategy": "optim_grads"}, SP),
    (4, {"tp": 2, "pp": 2, "etp": 2, "strategy": "optim"}, SP),
]
SAVED = Path("checkpoints", f"step-{2:08}")
Biases = dict[str, list[float]]


def case_of(layout: Layout | None) -> Case:
    case = Case(STEPS).but(optim={"lr": LR, "adam_eps": 1e-5}, model=QUANTILES)
    if layout is None:
        return case.but(train={"micro_batch_size": GLOBAL_BATCH})
    num_ranks, sizes, options = layout
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
    train = {"micro_batch_size": micro_batch_size(num_ranks, sizes)}
    return case.but(parallel=parallel, train=train)


def biases_of(run: Run) -> Biases:
    tensors = run.parts.tensors().items()
    return {box.name: bias.tolist() for box, bias in tensors if "expert_bias" in box.name}


def train_and_read(ctx: ParallelContext, case: Case) -> tuple[Outcome, Biases]:
    run = build_here(ctx, case)
    outcome = outcome_of(run, train_steps(run, case.steps))
    return outcome, biases_of(run)


@cache
def single_rank() -> tuple[Outcome, Biases]:
    return run_ranks(1, train_and_read, case_of(None), shares=True)[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_has_the_biases_of_one_rank(layout: Layout) -> None:
    num_ranks, sizes, _ = layout
    results = run_ranks(num_ranks, train_and_read, case_of(layout), **sizes, shares=True)
    outcome, expected = single_rank()
    assert_alike([result for result, _ in results], [outcome], row=str(layout), lr=LR)
    found: Biases = {}
    for _, biases in results:
        for name, bias in biases.items():
            assert found.setdefault(name, bias) == bias, "replicas have equal bits"
    assert found.keys() == expected.keys()
    for name, bias in expected.items():
        assert found[name] == pytest.approx(bias, abs=1e-5), name
        assert max(bias) > 1e-3


def save_and_go_on(ctx: ParallelContext, case: Case, folder: Path) -> tuple[list[float], Biases]:
    run = build_here(ctx, case, folder=folder)
    train_steps(run, 2)
    save_step(ctx, run)
    losses = [output.loss for output in train_steps(run, 2)]
    return losses, biases_of(run)


def resume(ctx: ParallelContext, case: Case, folder: Path) -> tuple[list[float], Biases]:
    run = build_here(ctx, case, checkpoint=folder / SAVED, folder=folder)
    losses = [output.loss for output in train_steps(run, 2)]
    return losses, biases_of(run)


def test_another_layout_resumes_with_the_biases(tmp_path: Path) -> None:
    num_ranks, sizes, _ = LAYOUTS[1]
    saved = run_ranks(
        num_ranks, save_and_go_on, case_of(LAYOUTS[1]), tmp_path, **sizes, shares=True
    )
    losses, biases = saved[0]
    num_ranks, sizes, _ = LAYOUTS[4]
    results = run_ranks(num_ranks, resume, case_of(LAYOUTS[4]), tmp_path, **sizes, shares=True)
    resumed, found = results[0]
    assert resumed == pytest.approx(losses, rel=1e-5)
    for name, bias in biases.items():
        assert found[name] == pytest.approx(bias, abs=1e-5)


def frozen_biases(ctx: ParallelContext, case: Case) -> Biases:
    run = build_here(ctx, case)
    train_steps(run, 1)
    return biases_of(run)


def test_a_frozen_router_keeps_its_biases() -> None:
    case = case_of(None).but(optim={"freeze": ["layers.0.mlp.router.*"]})
    (biases,) = run_ranks(1, frozen_biases, case, shares=True)
    first, second = biases.values()
    assert not any(first) and any(second)
