"""`--muon-ns-algorithm gram`: the Newton-Schulz iteration on the Gram matrix of the smaller side.

A step x <- (a + b g + c g^2) x with g = x x^T multiplies from the left by a polynomial of g, so n x
n matrices suffice for x of [n, m], n <= m:

    g = x x^T,  q = 1                       [n, n]
    every step: z = b g + c g^2,  q <- (a + z) q,  g <- (a + z) g (a + z)
    x <- q x                                at the end, and before a restart, which begins again

In exact arithmetic this is `newton_schulz`. Rounding makes g and q x x^T q differ, so the iteration
restarts from x after every second step; three steps between restarts save more, but some
coefficients then diverge in bf16. Two steps take two products with m columns, where the plain
iteration takes four. Where that saves nothing, as for square matrices, the plain iteration runs.

Source: Zhang, Amsel, Chen and Dao 2026, "Gram Newton-Schulz".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig
from nanotrain.optim.newton_schulz import (
    EPSILON,
    Coefficients,
    coefficients_of,
    frobenius_norm,
    newton_schulz,
    newton_schulz_flops,
)
from nanotrain.optim.rule import Shape

STEPS_BETWEEN_RESTARTS = 2


def gram_newton_schulz(direction: Tensor, config: OptimConfig) -> Tensor:
    """Move the singular values of [..., rows, columns] near 1, in the dtype of the direction."""
    rows, columns = direction.shape[-2:]
    if not saves_flops((rows, columns), config):
        return newton_schulz(direction, config)
    is_tall = rows > columns
    x = direction.mT if is_tall else direction
    x = x / frobenius_norm(x).clamp(min=EPSILON)
    steps = coefficients_of(config.muon_coefficient_type, config.muon_num_ns_steps)
    for part in split_steps(steps):
        x = _polynomial(x @ x.mT, part) @ x
    return x.mT if is_tall else x


def _polynomial(gram: Tensor, steps: Sequence[Coefficients]) -> Tensor:
    """The product of the polynomials of some steps, [..., n, n].

    Args:
        gram: [..., n, n], of the matrix before these steps.
        steps: coefficients of the steps.
    """
    multiply_add = torch.addmm if gram.ndim == 2 else torch.baddbmm
    product: Tensor | None = None
    for index, (a, b, c) in enumerate(steps):
        factor = multiply_add(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
        if index < len(steps) - 1:
            gram = factor @ gram @ factor
    assert product is not None, "a part has at least one step"
    return product


def split_steps(steps: Sequence[Coefficients]) -> list[Sequence[Coefficients]]:
    """The steps between restarts.

    >>> [len(part) for part in split_steps([(2.0, -1.5, 0.5)] * 5)]
    [2, 2, 1]
    """
    starts = range(0, len(steps), STEPS_BETWEEN_RESTARTS)
    return [steps[start : start + STEPS_BETWEEN_RESTARTS] for start in starts]


def saves_flops(shape: Shape, config: OptimConfig) -> bool:
    """Whether the iteration on Gram matrices has fewer FLOPs than the plain one."""
    return _gram_flops(shape, config) < newton_schulz_flops(shape, config)


def gram_newton_schulz_flops(shape: Shape, config: OptimConfig) -> int:
    """FLOPs of `gram_newton_schulz`.

    >>> config = OptimConfig(muon_num_ns_steps=5)
    >>> gram_newton_schulz_flops((10, 40), config), newton_schulz_flops((10, 40), config)
    (70000, 90000)
    """
    return min(_gram_flops(shape, config), newton_schulz_flops(shape, config))


def _gram_flops(shape: Shape, config: OptimConfig) -> int:
    """FLOPs of the iteration on Gram matrices: two rectangular products per part, else square."""
    small = min(shape)
    large = max(shape)
    steps = coefficients_of(config.muon_coefficient_type, config.muon_num_ns_steps)
    num_rectangular = 0
    num_square = 0
    for part in split_steps(steps):
        num_rectangular += 2
        num_square += len(part)  # squares of Gram matrices
        num_square += 3 * (len(part) - 1)  # the next Gram matrix, and the product of polynomials
    return 2 * small * small * (num_rectangular * large + num_square * small)
