"""One sublayer after the other: x + attention(norm(x)), then x + mlp(norm(x))."""

from collections.abc import Sequence
from dataclasses import replace

from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, summed
from nanotrain.spec.layer_inputs import declare_half, half_operators
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Operators, Saved
from nanotrain.spec.residuals.residual import Sublayer, addition, in_residual, with_norms


def declare_plain(declare: Declaration, sublayers: Sequence[Sublayer], *, index: int) -> Specs:
    """The sublayers with their norms."""
    specs: Specs = ()
    for sublayer in sublayers:
        specs += with_norms(declare, sublayer, index=index)
    return specs


def declare_shortcut(declare: Declaration, sublayers: Sequence[Sublayer], *, index: int) -> Specs:
    """Two blocks; the experts of the first are added at the end of the second (LongCat-Flash)."""
    first = declare_plain(declare, sublayers[:2], index=index)
    second = declare_plain(declare, sublayers[2:], index=index)
    return first + nest("second", second)


def declare_extended(declare: Declaration, sublayers: Sequence[Sublayer], *, index: int) -> Specs:
    """A block, an input of its own and the learned factor of its output (Gemma 4)."""
    specs = declare_plain(declare, sublayers, index=index)
    if declare.shape.layer_input_size:
        specs += nest("layer_input", declare_half(declare))
    if declare.shape.layer_scale:
        scale = summed([declare.vector("weight", 1, value=1.0)], declare.sequence_axes)
        specs += nest("layer_scale", grouped("norms", scale))
    return specs


def extended_operators(s: LayerSizes, sublayers: Sequence[Sublayer]) -> Operators:
    """The sublayers, the input of the layer, and the product with the factor."""
    extended = operators(s, sublayers)
    if s.shape.layer_input_size:
        extended += half_operators(s)
    if s.shape.layer_scale:
        saved = Saved(s.outside * s.width)  # for the gradient of the factor
        extended.append(replace(addition(s), name="layer_scale", saves=(saved,)))
    return extended


def operators(s: LayerSizes, sublayers: Sequence[Sublayer]) -> Operators:
    """The operators of the sublayers, with their norms and residual sums."""
    operators: Operators = []
    for sublayer in sublayers:
        operators += in_residual(s, sublayer)
    return operators
