"""Perturbations of a run, and the noise that they measure."""

from math import inf

import pytest
import torch
from torch import nn

from nanotrain.config.precision import Fp8Config, PrecisionConfig
from nanotrain.parity.perturbation import FLOOR, Deviation, Noise, Perturbation, size_of


@pytest.mark.parametrize(
    ("precision", "size"),
    [
        (PrecisionConfig(), 2**-24),
        (PrecisionConfig(params_dtype="bf16"), 2**-8),
        (PrecisionConfig(params_dtype="fp16"), 2**-11),
        (PrecisionConfig(params_dtype="bf16", fp8=Fp8Config(format="hybrid")), 2**-4),
        (PrecisionConfig(params_dtype="bf16", fp8=Fp8Config(format="e2m1", recipe="nvfp4")), 2**-2),
    ],
)
def test_the_size_is_half_of_the_last_bit_of_products(precision: PrecisionConfig, size: float):
    assert size_of(precision) == size


def test_inputs_of_layers_and_their_gradients_change_in_the_last_bit():
    stage = nn.Sequential(nn.Identity(), nn.Flatten(2))
    Perturbation(2**-8, seed=1).attach([stage])
    x = torch.linspace(1, 2, 1200, dtype=torch.bfloat16).view(3, 20, 20).requires_grad_()
    out = stage(x)
    out.backward(torch.ones_like(out))
    for changed, value in ((out, x.detach()), (x.grad, torch.ones_like(x))):
        steps = (changed.detach().view(torch.int16) - value.view(torch.int16)).abs()
        assert steps.max() <= 2 and (steps > 0).float().mean() > 0.4
    assert torch.equal(stage(x), out) is False, "signs are drawn anew"


def test_a_seed_gives_the_same_signs_again_and_integers_stay():
    outputs = []
    for seed in (1, 1, 2):
        stage = nn.Sequential(nn.Flatten(2))
        Perturbation(2**-8, seed=seed).attach([stage])
        outputs.append(stage(torch.ones(2, 3, 4)))
        assert torch.equal(stage(torch.ones(2, 3, 4, dtype=torch.int64)), torch.ones(2, 3, 4))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def test_a_factor_is_along_a_tensor_and_a_rounding_is_not():
    reference = torch.randn(10_000)
    scaled = Deviation.between(0.01 * reference, reference)
    assert scaled.norm == pytest.approx(0.01) and scaled.along == pytest.approx(0.01)
    signs = torch.randint(0, 2, reference.shape) * 2 - 1
    rounded = Deviation.between(0.01 * signs * reference, reference)
    assert rounded.norm == pytest.approx(0.01) and rounded.along < 0.001
    assert Noise.of([rounded]).factor(rounded) == 1 < Noise.of([rounded]).factor(scaled)


def test_deviations_that_are_not_finite_and_from_zero_are_infinite():
    zeros = torch.zeros(3)
    assert Deviation.between(zeros, zeros) == Deviation(0.0, 0.0)
    assert Deviation.between(torch.ones(3), zeros) == Deviation(inf, inf)
    for value in (inf, torch.nan):
        assert Deviation.between(torch.tensor([0.0, value]), torch.ones(2)) == Deviation(inf, inf)


def test_noise_is_the_largest_of_the_runs_and_at_least_that_of_fp32_sums():
    noise = Noise.of([Deviation(0.1, 0.0), Deviation(0.05, 0.02)])
    assert noise == Noise(0.1, 0.02)
    assert Noise.of([Deviation(0.0, 0.0)]) == Noise(FLOOR, FLOOR)
    assert noise.factor(Deviation(0.05, 0.06)) == pytest.approx(3)
