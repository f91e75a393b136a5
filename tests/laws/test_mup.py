"""muP: sizes of initial weights and of a first update by class of parameter, in every layout.

Yang et al. 2022, "Tensor Programs V", table 8, with a width of four times the base: initial weights
of hidden matrices are half as large, and Adam moves them by a quarter of the learning rate.
"""

from functools import cache
from typing import Any

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.dp.param_buffer import gathered
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.worlds import GLOBAL_BATCH, LR, Case, Outcome, build_here, train_here, train_steps

MODEL = {
    "use_mup": True,
    "mup_base_hidden_size": 10,
    "untie_embeddings_and_output_weights": True,
}
OPTIM = {"clip_grad": 0.0, "weight_decay": 0.0, "adam_eps": 1e-12}
CASE = Case(3).but(model=MODEL, optim=OPTIM)
ONE_RANK = {"micro_batch_size": GLOBAL_BATCH}
# the factor of the learning rate of each class, by a parameter of the class
CLASSES = {
    "layers.0.attention.query.weight": 0.25,
    "layers.1.mlp.down.weight": 0.25,
    "embedding.word.weight": 1.0,
    "head.weight": 1.0,
    "layers.0.mlp_norm.weight": 1.0,
}


def before_and_after(ctx: ParallelContext, case: Case) -> list[dict[str, torch.Tensor]]:
    """The weights before and after the first step."""
    run = build_here(ctx, case)
    states = []
    for steps in (0, 1):
        train_steps(run, steps)
        with gathered(run.data_parallel):
            named = run.stages[0].named_parameters()
            states.append({name: param.detach().clone() for name, param in named})
    return states


@cache
def single_rank() -> list[Outcome]:
    return run_ranks(1, train_here, CASE.but(train=ONE_RANK), shares=True)


def test_a_first_step_moves_each_class_by_its_rate() -> None:
    case = CASE.but(train=ONE_RANK)
    ((before, after),) = run_ranks(1, before_and_after, case, shares=True)
    for name, factor in CLASSES.items():
        moved = (after[name] - before[name]).abs().max()
        assert float(moved) == pytest.approx(factor * LR, rel=1e-3), name


def test_initial_weights_of_hidden_matrices_shrink_with_the_width() -> None:
    stds = []
    for model in ({"use_mup": False}, {}):
        case = CASE.but(train=ONE_RANK, model=model)
        weights = run_ranks(1, before_and_after, case, shares=True)[0][0]
        stds.append({name: float(weights[name].std()) for name in CLASSES})
    plain, scaled = stds
    for name, factor in CLASSES.items():
        if name.endswith("norm.weight"):
            continue
        expected = 0.5 if factor != 1 else 1.0
        assert scaled[name] / plain[name] == pytest.approx(expected, rel=1e-4), name


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 2, "strategy": "optim"}, {"pp": 2, "strategy": "optim_grads_params"}],
    ids=str,
)
def test_a_layout_trains_as_one_rank_does(sizes: dict[str, Any]) -> None:
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()}
    case = CASE.but(parallel=parallel, train={"micro_batch_size": 3})
    outcomes = run_ranks(4, train_here, case, **sizes, shares=True)
    assert_alike(outcomes, single_rank(), row=f"muP {sizes}", lr=LR)
