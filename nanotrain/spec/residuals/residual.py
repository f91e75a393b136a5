"""`ResidualKind`: one row of the table of residual connections, and what all rows share.

Sublayer                        a token mixer or an MLP with the name of its parameters
with_norms, norm_operator       norms of the input and of the output of a sublayer
normalized_operators            operators of sublayer(norm(x)), and the norm of the output
in_residual                     operators of x + sublayer(norm(x))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nanotrain.spec.declaration import Declaration, LayerKind, Specs, grouped, nest, norm
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import NORM_MODULES, Norm, Operators, Product, Residual, Saved
from nanotrain.spec.shape import ModelShape


@dataclass(frozen=True)
class Sublayer:
    """A token mixer or an MLP of a layer."""

    name: str  # "attention" or "mlp", the prefix of its parameters
    kind: LayerKind


@dataclass(frozen=True)
class ResidualKind:
    """How the sublayers of a layer read and write the residual stream; one row of the table."""

    # (declaration, sublayers, *, index): parameters of a layer, named relative to it
    declare: Callable[..., Specs]
    # operators of a layer, in forward order
    operators: Callable[[LayerSizes, Sequence[Sublayer]], Operators]
    # residual streams, all of which stages send
    num_streams: Callable[[ModelShape], int] = lambda shape: 1
    # parameters and operators between the last layer and the final norm
    declare_end: Callable[[Declaration], Specs] = lambda declare: ()
    end_operators: Callable[[LayerSizes], Operators] = lambda s: []


def with_norms(declare: Declaration, sublayer: Sublayer, *, index: int) -> Specs:
    """The parameters of a sublayer, with the norms of its input and of its output."""
    has_pre, has_post = declare.shape.norms_of(index)
    specs: Specs = ()
    if has_pre and not has_own_norms(declare.shape, sublayer, layer=index):
        specs += nest(f"{sublayer.name}_norm", hidden_norm(declare))
    specs += sublayer_specs(declare, sublayer)
    if has_post:
        specs += nest(f"{sublayer.name}_post_norm", hidden_norm(declare))
    return specs


def sublayer_specs(declare: Declaration, sublayer: Sublayer) -> Specs:
    """The parameters of a sublayer."""
    return nest(sublayer.name, grouped(sublayer.name, sublayer.kind.declare(declare)))


def hidden_norm(declare: Declaration) -> Specs:
    """The parameters of a norm of hidden states."""
    return norm(declare, declare.shape.hidden_size)


def has_own_norms(shape: ModelShape, sublayer: Sublayer, *, layer: int) -> bool:
    """Whether a sublayer normalizes its input itself: experts with separate norms do."""
    has_experts = sublayer.name == "mlp" and shape.has_experts(layer)
    return has_experts and shape.has_separate_norms


def in_residual(s: LayerSizes, sublayer: Sublayer) -> Operators:
    """A sublayer with its norms and the addition to the residual stream."""
    return [*normalized_operators(s, sublayer), addition(s)]


def normalized_operators(s: LayerSizes, sublayer: Sublayer) -> Operators:
    """A sublayer with the norms of its input and of its output."""
    has_pre, has_post = s.shape.norms_of(s.layer)
    inner = sublayer.kind.operators(s)
    operators = [*inner]
    if has_pre and not has_own_norms(s.shape, sublayer, layer=s.layer):
        operators.insert(0, input_norm(s, inner))
    if has_post:  # never recomputed
        operators.append(norm_operator(s))
    return operators


def input_norm(s: LayerSizes, inner: Operators) -> Norm:
    """The norm in front of a sublayer, which the casts of its first product may compute."""
    norm = norm_operator(s, modules=NORM_MODULES)
    is_cast = isinstance(inner[0], Product) and inner[0].casts_norm
    return replace(norm, is_cast=is_cast)


def addition(s: LayerSizes) -> Residual:
    """The addition of an output to the residual stream."""
    return Residual(name="add", numel=s.outside * s.shape.hidden_size)


def norm_operator(s: LayerSizes, *, name: str = "layernorm", modules: tuple[str, ...] = ()) -> Norm:
    """A norm of hidden states.

    Args:
        s: sizes of the layer.
        name: name of the norm.
        modules: recompute modules that keep the input of the norm alone and run it again.
    """
    hidden = s.shape.hidden_size
    norm_input = Saved(s.outside * s.width)
    extra = Saved(s.outside * s.norm_extra(hidden), dropped_by=modules)
    saves = (norm_input, extra)
    return Norm(name=name, recomputed_by=modules, numel=s.outside * hidden, saves=saves)
