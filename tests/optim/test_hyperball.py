"""`--optimizer muon_h` and `adam_h` beside the formulas of Hyperball, in fp64."""

import pytest
import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig
from nanotrain.optim.hyperball import adam_direction
from nanotrain.optim.rule import ParamRange, UpdateStep
from tests.harness import run_ranks
from tests.optim.matrix_reference import (
    SHAPES,
    assert_follows,
    momentum_of,
    orthogonalize,
)
from tests.optim.matrix_reference import (
    adam_direction as adam_of_paper,
)
from tests.optim.test_distributed import Trainee, grads_of, noise

LR = 1e-2
MUON_H = OptimConfig(
    optimizer="muon_h",
    clip_grad=0.0,
    weight_decay=0.2,
    muon_momentum=0.9,
    muon_fp32_matmul_prec="highest",
)
ADAM_H = OptimConfig(optimizer="adam_h", clip_grad=0.0, weight_decay=0.2, adam_eps=1e-5)


def on_sphere(weight: Tensor, update: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The radius is the norm of the initial weights; the update has the length lr * radius."""
    radius = state.setdefault("radius", weight.norm())
    moved = weight - LR * radius * update / update.norm()
    return radius * moved / moved.norm()


def muon_step(weight, grad, state, number):
    return on_sphere(weight, orthogonalize(momentum_of(grad, state, MUON_H)), state)


def adam_step(weight, grad, state, number):
    return on_sphere(weight, adam_of_paper(grad, state, number, ADAM_H), state)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    ("config", "step"), [(MUON_H, muon_step), (ADAM_H, adam_step)], ids=["muon_h", "adam_h"]
)
def test_weights_follow_the_formulas(config, step, num_ranks: int) -> None:
    assert_follows(num_ranks, config, step)


@pytest.mark.parametrize("config", [MUON_H, ADAM_H], ids=["muon_h", "adam_h"])
def test_norms_stay_and_updates_have_their_length(config: OptimConfig) -> None:
    run_ranks(1, check_norms, config, strategy="optim", shares=True)


def check_norms(ctx, config: OptimConfig) -> None:
    trainee = Trainee(ctx, "optim", config=config, shapes=SHAPES)
    for number in range(1, 20):  # the gradients of step 0 are the weights
        before = trainee.weights()
        trainee.step(grads_of(0, number, shapes=SHAPES))
        for name, weight in trainee.weights().items():
            initial = noise(weight.shape, seed=int(name[6]))
            if weight.ndim != 2:
                continue
            assert weight.double().norm().item() == pytest.approx(
                initial.double().norm().item(), rel=1e-6
            )
            # a chord of the sphere, and the update before the projection
            moved = (weight - before[name]).norm() / initial.norm()
            assert LR * 0.5 < moved < LR * 1.01


def test_a_skipped_first_step_changes_nothing() -> None:
    state = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    part = ParamRange(torch.ones(3), torch.zeros(3), state, weight_decay=True)
    step = UpdateStep(
        ADAM_H,
        number=torch.tensor(0.0),
        lr=LR,
        decoupled_lr=LR,
        weight_decay=0.0,
        found_inf=torch.tensor(1.0),
    )
    assert not adam_direction(part, step).any()
    assert not state["exp_avg_sq"].any()
