"""Newton-Schulz iterations: a matrix with all singular values moved near 1.

    x <- a x + b (x x^T) x + c (x x^T)^2 x        [rows, columns], rows <= columns

The coefficients of each step, `--muon-coefficient-type`, by the names of Megatron-LM:

    simple          Jordan et al. 2024, "Muon": the same in every step; torch.optim.Muon
    quintic         Cesista 2025, "Squeezing 1-2% Efficiency Gains Out of Muon by Optimizing the
                    Newton-Schulz Coefficients": five steps, optimized together
    polar_express   Amsel et al. 2025, "The Polar Express" (arXiv 2505.16932), algorithm 1: the
                    best polynomial for each step, each divided by a safety factor; the last repeats
    hybrid          DeepSeek-V4: the simple ones, then two steps that bring singular values to 1
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig
from nanotrain.config.optim import MuonCoefficientType
from nanotrain.optim.rule import Shape

Coefficients = tuple[float, float, float]

EPSILON = 1e-7  # least norm that a direction is divided by
SAFETY_FACTOR = 1.01  # of all steps of the Polar Express but the last
SIMPLE: Coefficients = (3.4445, -4.7750, 2.0315)
STABLE: Coefficients = (2.0, -1.5, 0.5)  # 1 is a fixed point, at which the slope is 0
NUM_STABLE = 2  # last steps of the hybrid iteration
QUINTIC: tuple[Coefficients, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# of singular values from 1e-3 to 1
POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)


def coefficients_of(kind: MuonCoefficientType, num_steps: int) -> Sequence[Coefficients]:
    """The coefficients of every step.

    >>> [round(a, 4) for a, _, _ in coefficients_of("polar_express", 3)]
    [8.2052, 4.0664, 3.9096]
    """
    if kind == "simple":
        return [SIMPLE] * num_steps
    if kind == "hybrid":
        return [SIMPLE] * (num_steps - NUM_STABLE) + [STABLE] * NUM_STABLE
    if kind == "quintic":
        return [QUINTIC[step % len(QUINTIC)] for step in range(num_steps)]
    steps = []
    last = len(POLAR_EXPRESS) - 1
    for step in range(num_steps):
        a, b, c = POLAR_EXPRESS[min(step, last)]
        if step < last:
            a /= SAFETY_FACTOR
            b /= SAFETY_FACTOR**3
            c /= SAFETY_FACTOR**5
        steps.append((a, b, c))
    return steps


def newton_schulz(direction: Tensor, config: OptimConfig) -> Tensor:
    """Move the singular values of [..., rows, columns] near 1, in the dtype of the direction.

    Five simple steps bring singular values of 1e-2 to 1 times the largest into about [0.7, 1.2].
    """
    is_tall = direction.shape[-2] > direction.shape[-1]
    x = direction.mT if is_tall else direction
    x = x / frobenius_norm(x).clamp(min=EPSILON)  # the spectral norm is at most this one
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in coefficients_of(config.muon_coefficient_type, config.muon_num_ns_steps):
        gram = x @ x.mT
        polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
        x = multiply_add(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def frobenius_norm(x: Tensor) -> Tensor:
    """Frobenius norms of [rows, columns], a scalar, or of [heads, rows, columns], [heads, 1, 1]."""
    if x.ndim == 2:
        return x.norm()
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


def newton_schulz_flops(shape: Shape, config: OptimConfig) -> int:
    """FLOPs of `newton_schulz`: per step two rectangular products and one of the Gram matrix.

    >>> newton_schulz_flops((40, 10), OptimConfig(muon_num_ns_steps=1))
    18000
    """
    small = min(shape)
    large = max(shape)
    rectangular = 2 * small * small * large
    square = 2 * small**3
    return config.muon_num_ns_steps * (2 * rectangular + square)
