"""`--optimizer normuon` beside algorithm 1 of its paper, in fp64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig
from nanotrain.optim import OPTIMIZERS
from nanotrain.optim.normuon import normalize_neurons
from nanotrain.optim.rule import UpdateStep
from tests.harness import run_ranks
from tests.optim.matrix_reference import (
    SHAPES,
    assert_follows,
    momentum_of,
    orthogonalize,
)
from tests.optim.test_distributed import Trainee, grads_of

LR = 1e-2
CONFIG = OptimConfig(
    optimizer="normuon",
    clip_grad=0.0,
    weight_decay=0.2,
    muon_momentum=0.9,
    muon_fp32_matmul_prec="highest",
    normuon_beta2=0.8,
    normuon_eps=1e-4,
)


def normalized(update: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Lines 6 to 9 of the algorithm."""
    rows, columns = update.shape
    before = state.get("neurons", torch.zeros(rows, dtype=update.dtype))
    state["neurons"] = 0.8 * before + (1 - 0.8) * update.square().mean(dim=1)
    neurons = update / (state["neurons"].sqrt() + 1e-4)[:, None]
    return neurons * 0.2 * math.sqrt(rows * columns) / neurons.norm()


def step_of_paper(weight, grad, state, number):
    update = normalized(orthogonalize(momentum_of(grad, state, CONFIG)), state)
    return weight * (1 - LR * CONFIG.weight_decay) - LR * update


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_weights_follow_the_paper(num_ranks: int) -> None:
    assert_follows(num_ranks, CONFIG, step_of_paper)


HEAD = (2, 4)


def step_per_head(weight, grad, state, number):
    """Every slice of 2 and of 4 rows is a matrix."""
    direction = momentum_of(grad, state, CONFIG)
    slices = [len(grad)] if len(grad) % sum(HEAD) else list(HEAD) * (len(grad) // sum(HEAD))
    updates = []
    for index, part in enumerate(direction.split(slices)):
        moments = state.setdefault(f"slice {index}", {})
        updates.append(normalized(orthogonalize(part), moments))
    return weight * (1 - LR * CONFIG.weight_decay) - LR * torch.cat(updates)


def test_heads_have_a_norm_each() -> None:
    config = replace(CONFIG, muon_split_qkv_per_head=True)
    assert_follows(2, config, step_per_head, head_rows=HEAD)


def test_a_skipped_step_leaves_the_second_moment() -> None:
    moment = torch.rand(4)
    for found_inf in (1.0, 0.0):
        before = moment.clone()
        step = UpdateStep(
            CONFIG,
            number=torch.tensor(1.0),
            lr=LR,
            decoupled_lr=LR,
            weight_decay=0.0,
            found_inf=torch.tensor(found_inf),
        )
        update = normalize_neurons(torch.randn(4, 6), moment, head_rows=(), step=step)
        assert moment.equal(before) == bool(found_inf)
        assert update.square().mean().sqrt() == pytest.approx(1.0, rel=1e-5)


def state_names(ctx) -> dict[str, tuple[int, ...]]:
    trainee = Trainee(ctx, "optim", config=CONFIG, shapes=SHAPES)
    trainee.step(grads_of(ctx.rank, 0, shapes=SHAPES))
    return {
        box.name: box.shape
        for box, tensor in trainee.optimizer.tensors_to_save().items()
        if "neuron" in box.name and tensor.any()
    }


def test_one_number_per_row_is_saved_by_the_owner_alone() -> None:
    results = run_ranks(2, state_names, strategy="optim", shares=True)
    first, second = results
    prefix = "optimizer/neuron_exp_avg_sq/units."
    expected = {
        f"{prefix}0.weight": (1, 12),
        f"{prefix}2.weight": (1, 18),
        f"{prefix}3.weight": (3, 5),
        f"{prefix}4.weight": (1, 6),
    }
    assert first | second == expected
    assert (first.keys() & second.keys()) <= {f"{prefix}3.weight"}  # experts have owners apart
    matrix = OPTIMIZERS["normuon"].matrix
    assert matrix is not None
    assert matrix.scale((3, 4), replace(CONFIG, muon_extra_scale_factor=2.0)) == 0.4
