"""`--optimizer muon`: orthogonalized momentum for hidden matrices, `--muon-scalar-optimizer` for
the rest.

    momentum   m = lerp(m, g, 1 - momentum); with Nesterov the direction is lerp(g, m, momentum)
    transform  Newton-Schulz iteration: the direction with all singular values moved near 1
    update     w = w * (1 - lr * weight_decay) - lr * scale * transform(direction)

The arithmetic is that of torch.optim.Muon, bf16 included: equal inputs give equal bits.

Source: Jordan et al. 2024, "Muon"; Liu et al. 2025, "Muon is Scalable for LLM Training", section
2.2, for the scale.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig
from nanotrain.config.optim import MuonScaleMode
from nanotrain.optim.elementwise import ADAM, LION
from nanotrain.optim.rule import MatrixRule, ParamRange, Shape, UpdateRule

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial
EPSILON = 1e-7  # least norm that a direction is divided by

SCALAR_RULES: dict[str, UpdateRule] = {"adam": ADAM, "lion": LION}
SCALES: dict[MuonScaleMode, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


def update_momentum(part: ParamRange, config: OptimConfig) -> Tensor:
    """Update the momentum buffer; returns [n], the direction."""
    buffer = part.state["momentum_buffer"]
    buffer.lerp_(part.grad, 1.0 - config.muon_momentum)
    return part.grad.lerp(buffer, config.muon_momentum) if config.muon_use_nesterov else buffer


def newton_schulz(direction: Tensor, config: OptimConfig) -> Tensor:
    """Move the singular values of [rows, columns] near 1, in the dtype of the direction.

    Five steps bring those from 1e-2 to 1 of the largest into about [0.7, 1.2].
    """
    a, b, c = COEFFICIENTS
    is_tall = direction.shape[0] > direction.shape[1]
    x = direction.T if is_tall else direction
    x = x / x.norm().clamp(min=EPSILON)  # the spectral norm is at most this one
    for _ in range(config.muon_num_ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def newton_schulz_flops(shape: Shape, config: OptimConfig) -> int:
    """FLOPs of `newton_schulz`: two products with the smaller dim inside, and one of the Gram
    matrix with itself.

    >>> newton_schulz_flops((4096, 1024), OptimConfig(muon_num_ns_steps=1)) == 4 * 1024**2 * 4096 + 2 * 1024**3
    True
    """
    small, large = min(shape), max(shape)
    return config.muon_num_ns_steps * (4 * small * small * large + 2 * small**3)


def scale_of(shape: Shape, config: OptimConfig) -> float:
    """Factor of the update of a matrix.

    >>> scale_of((4096, 1024), OptimConfig(muon_extra_scale_factor=0.5))
    32.0
    """
    return config.muon_extra_scale_factor * SCALES[config.muon_scale_mode](*shape)


MUON = UpdateRule(  # parameters that are no hidden matrices have the scalar rule
    state_names=lambda config: SCALAR_RULES[config.muon_scalar_optimizer].state_names(config),
    update=lambda ranges, step: SCALAR_RULES[step.config.muon_scalar_optimizer].update(
        ranges, step
    ),
    matrix=MatrixRule(
        state_names=("momentum_buffer",),
        direction=update_momentum,
        momentum="momentum_buffer",
        transform=newton_schulz,
        scale=scale_of,
        flops=newton_schulz_flops,
        dtype=lambda config: (
            torch.bfloat16 if config.muon_fp32_matmul_prec == "medium" else torch.float32
        ),
    ),
)
