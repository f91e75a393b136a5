"""A learned weight per channel of x and of the output of a sublayer (Muse Spark)."""

from collections.abc import Sequence
from dataclasses import replace

from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, summed
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import Operators, Saved
from nanotrain.spec.residuals.plain import declare_plain
from nanotrain.spec.residuals.residual import Sublayer, addition, normalized_operators

# vectors that autograd keeps: both weights, and what that of x is computed from
NUM_VECTORS = 5


def declare_gated(declare: Declaration, sublayers: Sequence[Sublayer], *, index: int) -> Specs:
    """Sublayers, followed by the gate of each."""
    specs = declare_plain(declare, sublayers, index=index)
    gate = summed([declare.vector("weight", declare.shape.hidden_size)], declare.sequence_axes)
    for sublayer in sublayers:
        specs += nest(f"{sublayer.name}_gate", grouped("norms", gate))
    return specs


def operators(s: LayerSizes, sublayers: Sequence[Sublayer]) -> Operators:
    """Sublayers and weighted sums, which keep the outputs."""
    output = Saved(s.outside * s.width)
    weights = Saved(NUM_VECTORS * s.shape.hidden_size * FP32)
    weighted = replace(addition(s), name="weighted_add", saves=(output, weights))
    operators: Operators = []
    for sublayer in sublayers:
        operators += [*normalized_operators(s, sublayer), weighted]
    return operators
