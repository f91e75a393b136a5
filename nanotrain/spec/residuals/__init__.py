"""Residual connections, pure: one row per kind, with the parameters and operators of a layer.

    RESIDUALS   by the names in `ModelShape.residual`

Their modules are in the table of model/transformer.py. docs/residuals.md shows how to add one.
"""

from nanotrain.spec.residuals import parallel, plain
from nanotrain.spec.residuals.residual import ResidualKind

RESIDUALS: dict[str, ResidualKind] = {
    "plain": ResidualKind(plain.declare_plain, plain.operators),
    "shortcut": ResidualKind(plain.declare_shortcut, plain.operators),
    "layer_scale": ResidualKind(plain.declare_scaled, plain.scaled_operators),
    "parallel": ResidualKind(parallel.declare_parallel, parallel.operators),
}
