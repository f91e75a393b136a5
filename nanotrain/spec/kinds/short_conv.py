"""Gated short convolution (LFM2): parameters and operators; the module is model/short_conv.py."""

from functools import partial

from nanotrain.spec.declaration import Declaration, Specs, nest
from nanotrain.spec.kinds.convolution import scan_modules, short_convolutions
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Gate, Operators, Saved
from nanotrain.spec.shape import ModelShape


def declare(declare: Declaration) -> Specs:
    """Two gates, the values, their convolution and the output, all as wide as the hidden state."""
    hidden = declare.shape.hidden_size
    bias = declare.shape.has_linear_bias
    projection = declare.column_linear(hidden, hidden, bias=bias)
    convolution = declare.convolution(hidden, kernel_size(declare.shape), bias=bias)
    specs = nest("gate_in", projection)
    specs += nest("gate_out", projection)
    specs += nest("value", projection)
    specs += nest("conv", convolution)
    return specs + nest("output", declare.row_linear(hidden, hidden, bias=bias))


def kernel_size(shape: ModelShape) -> int:
    """Tokens that the convolution sees."""
    assert shape.linear_attention is not None, "linear_attention_type is set"
    return shape.linear_attention.conv_kernel_dim


def operators(s: LayerSizes) -> Operators:
    """output(gate_out * conv(gate_in * value))."""
    channels = s.shape.hidden_size // s.tp
    numel = s.tokens * channels
    factor = Saved(numel * s.itemsize)
    convolution = short_convolutions(
        s, {"conv": channels}, kernel_size=kernel_size(s.shape), num_saved=1
    )
    dropped = Saved(factor.num_bytes, dropped_by=scan_modules(s))
    projected = {"gate_in": channels, "gate_out": channels, "value": channels}
    operators: Operators = [s.column(projected, saves=(s.layer_input,))]
    gate = partial(Gate, numel=numel, recomputed_by=scan_modules(s))
    operators.append(gate(name="gate_in", saves=(factor, factor)))
    operators.append(convolution)
    operators.append(gate(name="gate_out", saves=(factor, dropped)))
    operators.append(s.row(channels, saves=(dropped,)))
    return operators
