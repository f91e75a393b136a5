"""Attention and MLP side by side: x + attention(norm(x)) + mlp(norm(x)) (GPT-J).

The two norms are those of attention and of the MLP (GPT-NeoX), or one of both (GPT-J, Cohere).
"""

from collections.abc import Sequence
from dataclasses import replace

from nanotrain.spec.declaration import Declaration, Specs, nest
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Norm, Operator, Operators
from nanotrain.spec.residuals.residual import (
    Sublayer,
    addition,
    hidden_norm,
    input_norm,
    norm_operator,
    sublayer_specs,
    with_norms,
)


def declare_parallel(declare: Declaration, sublayers: Sequence[Sublayer], *, index: int) -> Specs:
    """Attention and MLP with a norm each, or followed by the norm of both."""
    _, has_post = declare.shape.norms_of(index)
    specs: Specs = ()
    for sublayer in sublayers:
        if not declare.shape.parallel_shared_norm:
            specs += with_norms(declare, sublayer, index=index)
            continue
        specs += sublayer_specs(declare, sublayer)
        if has_post:
            specs += nest(f"{sublayer.name}_post_norm", hidden_norm(declare))
    if declare.shape.parallel_shared_norm:
        specs += nest("input_norm", hidden_norm(declare))
    return specs


def operators(s: LayerSizes, sublayers: Sequence[Sublayer]) -> Operators:
    """Norms of one input, both sublayers, and the addition of their outputs."""
    has_pre, has_post = s.shape.norms_of(s.layer)
    attention, mlp = sublayers
    attended = attention.kind.operators(s)
    transformed = mlp.kind.operators(s)
    result: Operators = []
    if has_pre:
        result.append(input_norm(s, attended))
        if s.shape.parallel_shared_norm:
            transformed = [_without_input(operator, s) for operator in transformed]
        else:
            # both keep the same input
            result.append(_without_first_saved(input_norm(s, transformed)))
    result += attended
    if has_post:
        result.append(norm_operator(s))
    result += transformed
    if has_post:
        result.append(norm_operator(s))
    return [*result, addition(s), addition(s)]


def _without_first_saved(norm: Norm) -> Norm:
    """A norm whose input another operator keeps."""
    return replace(norm, saves=norm.saves[1:])


def _without_input(operator: Operator, s: LayerSizes) -> Operator:
    """An operator of the MLP without the input that attention keeps."""
    kept = []
    for saved in operator.saves:
        if replace(saved, only_with="") != s.layer_input:
            kept.append(saved)
    return replace(operator, saves=tuple(kept))
