"""One sublayer after the other: x + attention(norm(x)), then x + mlp(norm(x))."""

from collections.abc import Sequence
from dataclasses import replace

from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, summed
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


def declare_scaled(declare: Declaration, sublayers: Sequence[Sublayer], *, index: int) -> Specs:
    """A block, and the learned factor of its output (Gemma 4)."""
    scale = summed([declare.vector("weight", 1, value=1.0)], declare.sequence_axes)
    specs = declare_plain(declare, sublayers, index=index)
    return specs + nest("layer_scale", grouped("norms", scale))


def scaled_operators(s: LayerSizes, sublayers: Sequence[Sublayer]) -> Operators:
    """The sublayers, and the product with the factor."""
    saved = Saved(s.outside * s.width)  # for the gradient of the factor
    scale = replace(addition(s), name="layer_scale", saves=(saved,))
    return [*operators(s, sublayers), scale]


def operators(s: LayerSizes, sublayers: Sequence[Sublayer]) -> Operators:
    """The sublayers in their order, with what is around them."""
    operators: Operators = []
    for sublayer in sublayers:
        operators += in_residual(s, sublayer.kind.operators(s))
    return operators
