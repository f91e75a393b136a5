"""`--optimizer muon`: orthogonalized momentum for hidden matrices.

Other parameters are updated by `--muon-scalar-optimizer`.

    momentum   m = lerp(m, g, 1 - momentum); with Nesterov the direction is lerp(g, m, momentum)
    transform  Newton-Schulz iteration (`newton_schulz.py`): all singular values are moved near 1
    update     w = w * (1 - lr * weight_decay) - lr * scale * transform(direction)

With simple coefficients the arithmetic equals torch.optim.Muon, bf16 included: equal inputs give
equal bits.

Source: Jordan et al. 2024, "Muon"; Liu et al. 2025, "Muon is Scalable for LLM Training", section
2.2, for the scale.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig
from nanotrain.config.optim import MuonScaleMode, NewtonSchulzAlgorithm
from nanotrain.optim.elementwise import ADAM, LION
from nanotrain.optim.gram_newton_schulz import gram_newton_schulz, gram_newton_schulz_flops
from nanotrain.optim.newton_schulz import newton_schulz, newton_schulz_flops
from nanotrain.optim.rule import MatrixRule, ParamRange, Shape, UpdateRule, UpdateStep

SCALAR_RULES: dict[str, UpdateRule] = {"adam": ADAM, "lion": LION}
Transform = Callable[[Tensor, OptimConfig], Tensor]
Flops = Callable[[Shape, OptimConfig], int]
ALGORITHMS: dict[NewtonSchulzAlgorithm, tuple[Transform, Flops]] = {
    "standard": (newton_schulz, newton_schulz_flops),
    "gram": (gram_newton_schulz, gram_newton_schulz_flops),
}
SCALES: dict[MuonScaleMode, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


def update_momentum(part: ParamRange, step: UpdateStep) -> Tensor:
    """Update the momentum buffer; returns [n], the direction."""
    config = step.config
    buffer = part.state["momentum_buffer"]
    buffer.lerp_(part.grad, 1.0 - config.muon_momentum)
    if config.muon_use_nesterov:
        return part.grad.lerp(buffer, config.muon_momentum)
    return buffer


def orthogonalize(direction: Tensor, config: OptimConfig) -> Tensor:
    """Move the singular values of [..., rows, columns] near 1."""
    transform, _ = ALGORITHMS[config.muon_ns_algorithm]
    return transform(direction, config)


def orthogonalize_flops(shape: Shape, config: OptimConfig) -> int:
    """FLOPs of `orthogonalize`."""
    _, flops = ALGORITHMS[config.muon_ns_algorithm]
    return flops(shape, config)


def scale_of(shape: Shape, config: OptimConfig) -> float:
    """Factor of the update of a matrix.

    >>> scale_of((4096, 1024), OptimConfig(muon_extra_scale_factor=0.5))
    32.0
    """
    rows, columns = shape
    scale = SCALES[config.muon_scale_mode](rows, columns)
    return config.muon_extra_scale_factor * scale


def matmul_dtype(config: OptimConfig) -> torch.dtype:
    """The dtype of directions and of the products of `newton_schulz`."""
    return torch.bfloat16 if config.muon_fp32_matmul_prec == "medium" else torch.float32


def scalar_state_names(config: OptimConfig) -> tuple[str, ...]:
    """Names of the state of parameters that are not hidden matrices, by their own rule."""
    return SCALAR_RULES[config.muon_scalar_optimizer].state_names(config)


def update_scalars(ranges: Sequence[ParamRange], step: UpdateStep) -> None:
    """Update parameters that are not hidden matrices."""
    SCALAR_RULES[step.config.muon_scalar_optimizer].update(ranges, step)


MUON_MATRIX = MatrixRule(
    state_names=("momentum_buffer",),
    direction=update_momentum,
    momentum="momentum_buffer",
    transform=orthogonalize,
    scale=scale_of,
    flops=orthogonalize_flops,
    dtype=matmul_dtype,
)
MUON = UpdateRule(state_names=scalar_state_names, update=update_scalars, matrix=MUON_MATRIX)
