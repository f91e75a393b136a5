"""Newton-Schulz iterations beside their sources, written out in fp64."""

from itertools import repeat

import pytest
import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig
from nanotrain.config.optim import MuonCoefficientType
from nanotrain.optim.newton_schulz import coefficients_of, newton_schulz

# algorithm 1 of the paper: from its list to the coefficients of each step
PAPER = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]
# rounded down to four digits in Megatron-LM's library
MEGATRON = [
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
]


def polynomial_of_singular_values(
    matrix: Tensor, steps: list[tuple[float, float, float]]
) -> Tensor:
    """The same polynomials of the singular values of the normalized matrix."""
    u, values, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for a, b, c in steps:
        values = a * values + b * values**3 + c * values**5
    return u @ torch.diag(values) @ v


def paper_steps(num_steps: int) -> list[tuple[float, float, float]]:
    safe = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in PAPER[:-1]] + [PAPER[-1]]
    return safe[:num_steps] + list(repeat(safe[-1], num_steps - len(safe)))


@pytest.mark.parametrize("num_steps", [3, 8, 10])
def test_the_polar_express_is_that_of_its_paper(num_steps: int) -> None:
    found = coefficients_of("polar_express", num_steps)
    assert found == [pytest.approx(step, rel=1e-15) for step in paper_steps(num_steps)]
    for ours, theirs in zip(found, MEGATRON, strict=False):
        assert ours == pytest.approx(theirs, abs=1.1e-4)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
@pytest.mark.parametrize(
    ("kind", "num_steps"),
    [("simple", 5), ("quintic", 5), ("quintic", 10), ("polar_express", 9), ("hybrid", 10)],
)
def test_an_iteration_is_a_polynomial_of_the_singular_values(
    shape: tuple[int, int], kind: MuonCoefficientType, num_steps: int
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    config = OptimConfig(muon_coefficient_type=kind, muon_num_ns_steps=num_steps)
    steps = list(coefficients_of(kind, num_steps))
    found = newton_schulz(matrix, config)
    torch.testing.assert_close(
        found, polynomial_of_singular_values(matrix, steps), rtol=1e-9, atol=1e-9
    )


def test_how_near_one_the_singular_values_are() -> None:
    values = torch.logspace(-3, 0, 200, dtype=torch.float64)
    reached = {}
    for kind, num_steps in (("simple", 5), ("quintic", 5), ("polar_express", 8), ("hybrid", 10)):
        x = values / values.norm()
        for a, b, c in coefficients_of(kind, num_steps):  # type: ignore[arg-type]
            x = a * x + b * x**3 + c * x**5
        reached[kind] = (x[values > 0.1] - 1).abs().max().item()
    assert reached["polar_express"] < 0.01 < reached["quintic"] < 0.1 < reached["simple"] < 0.35
    assert reached["hybrid"] < 0.02
