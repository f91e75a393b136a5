"""Inputs of its own for each layer (Gemma 3n, Gemma 4): parameters and operators.

declare_inputs, input_operators   their computation, on the first stage
declare_half, half_operators      their use at the end of a layer

Modules are in model/layer_inputs.py.
"""

from dataclasses import replace

from nanotrain.spec.declaration import (
    COLUMN_SHARDS,
    Declaration,
    Specs,
    grouped,
    nest,
    norm,
    summed,
)
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import Gate, Lookup, Norm, Operators, Product, Residual, Saved


def declare_inputs(declare: Declaration) -> Specs:
    """The second embedding, the projection of the first, and its norm, which all layers share."""
    shape = declare.shape
    width = shape.num_layers * shape.layer_input_size
    table = replace(
        declare.weight(shape.padded_vocab_size, width, std=shape.embedding_std),
        shards=COLUMN_SHARDS,
        needs_whole_matrix=False,
        follows_width=False,
        is_embedding_or_output=True,
    )
    projection = summed([declare.weight(width, shape.hidden_size)], declare.sequence_axes)
    specs = nest("embedding", [table])
    specs += nest("projection", projection)
    specs += nest("norm", norm(declare, shape.layer_input_size))
    return grouped("embedding", specs)


def declare_half(declare: Declaration) -> Specs:
    """The gate, the projection and the norm of a layer; every tp rank has them."""
    shape = declare.shape
    size = shape.layer_input_size
    gate = [declare.weight(size, shape.hidden_size)]
    projection = [declare.weight(shape.hidden_size, size, std=declare.output_std)]
    specs = nest("gate", summed(gate, declare.sequence_axes))
    specs += nest("projection", summed(projection, declare.sequence_axes))
    specs += nest("norm", norm(declare, shape.hidden_size))
    return grouped("mlp", specs)


def input_operators(s: LayerSizes) -> Operators:
    """Look-up, projection and norm of the inputs of all layers, which are kept for them."""
    width = s.shape.num_layers * s.shape.layer_input_size
    if width == 0:
        return []
    numel = s.outside * width
    inputs = Saved(numel * s.itemsize)
    rows = Saved(s.outside * s.shape.num_layers * FP32)
    product = Product(
        name="layer_inputs",
        weights=("layer_inputs.projection.weight",),
        rows=s.outside,
        outputs=width,
        inputs=s.shape.hidden_size,
    )
    lookup = Lookup(name="layer_inputs", rows=s.tokens, saves=(inputs,))
    return [lookup, product, Norm(name="layer_inputs", numel=numel, saves=(inputs, rows))]


def half_operators(s: LayerSizes) -> Operators:
    """Gate, product with the input, projection, norm and residual addition."""
    hidden = s.shape.hidden_size
    size = s.shape.layer_input_size
    stream = Saved(s.outside * s.width)
    small = Saved(s.outside * size * s.itemsize)
    gate = Product(
        name="layer_input_gate",
        weights=("layer_input.gate.weight",),
        rows=s.outside,
        outputs=size,
        inputs=hidden,
        saves=(stream,),
    )
    # the gate before and after its activation
    product = Gate(name="layer_input", numel=s.outside * size, saves=(small, small))
    projection = Product(
        name="layer_input_projection",
        weights=("layer_input.projection.weight",),
        rows=s.outside,
        outputs=hidden,
        inputs=size,
        saves=(small,),
    )
    numel = s.outside * hidden
    extra = Saved(s.outside * s.norm_extra(hidden))
    post_norm = Norm(name="layernorm", numel=numel, saves=(stream, extra))
    return [gate, product, projection, post_norm, Residual(name="add", numel=numel)]
