"""The iteration on Gram matrices beside the plain one: equal, as exact, with fewer FLOPs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nanotrain.config.config import OptimConfig
from nanotrain.config.optim import MuonCoefficientType
from nanotrain.optim.gram_newton_schulz import gram_newton_schulz, gram_newton_schulz_flops
from nanotrain.optim.muon import orthogonalize, orthogonalize_flops
from nanotrain.optim.newton_schulz import newton_schulz, newton_schulz_flops


@pytest.mark.parametrize("shape", [(6, 6), (4, 16), (40, 9), (3, 5, 30)])
@pytest.mark.parametrize(
    ("kind", "num_steps"),
    [("simple", 5), ("quintic", 5), ("polar_express", 8), ("hybrid", 10), ("simple", 1)],
)
def test_gram_matrices_give_the_plain_iteration(
    shape: tuple[int, ...], kind: MuonCoefficientType, num_steps: int
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    config = OptimConfig(muon_coefficient_type=kind, muon_num_ns_steps=num_steps)
    plain = newton_schulz(matrix, config)
    torch.testing.assert_close(gram_newton_schulz(matrix, config), plain, rtol=1e-11, atol=1e-11)
    gram = OptimConfig(
        muon_coefficient_type=kind, muon_num_ns_steps=num_steps, muon_ns_algorithm="gram"
    )
    assert orthogonalize(matrix, gram).equal(gram_newton_schulz(matrix, config))
    assert orthogonalize(matrix, config).equal(plain)


@pytest.mark.parametrize(
    ("kind", "num_steps"), [("simple", 5), ("polar_express", 8), ("hybrid", 10), ("simple", 10)]
)
def test_restarts_keep_gram_matrices_as_exact_as_the_plain_iteration(
    kind: MuonCoefficientType, num_steps: int
) -> None:
    """In fp32 and bf16, with singular values down to 1e-4 of the largest."""
    config = OptimConfig(muon_coefficient_type=kind, muon_num_ns_steps=num_steps)
    draw = torch.Generator().manual_seed(5)
    u, _, v = torch.linalg.svd(
        torch.randn(32, 128, generator=draw, dtype=torch.float64), full_matrices=False
    )
    matrix = u @ torch.diag(torch.logspace(-4, 0, 32, dtype=torch.float64)) @ v
    exact = newton_schulz(matrix, config)
    for dtype in (torch.float32, torch.bfloat16):
        errors = []
        for iteration in (newton_schulz, gram_newton_schulz):
            errors.append((iteration(matrix.to(dtype), config).double() - exact).norm())
        assert errors[1] < 1.5 * errors[0], dtype


def test_flops_of_gram_matrices_are_those_of_their_products() -> None:
    config = OptimConfig(muon_num_ns_steps=5)
    gram = OptimConfig(muon_num_ns_steps=5, muon_ns_algorithm="gram")
    # parts of 2, 2 and 1 steps: two rectangular products each, 5 + 5 + 1 square ones
    assert gram_newton_schulz_flops((10, 40), config) == 2 * 100 * (6 * 40 + 11 * 10)
    assert orthogonalize_flops((40, 10), gram) < orthogonalize_flops((40, 10), config)
    assert orthogonalize_flops((10, 10), gram) == newton_schulz_flops((10, 10), config)
    counted = FlopCounterMode(display=False)
    with counted:
        gram_newton_schulz(torch.randn(10, 40), config)
    assert counted.get_total_flops() == gram_newton_schulz_flops((10, 40), config)
