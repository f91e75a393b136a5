"""Attention to the keys and values of an earlier layer: parameters and operators."""

from nanotrain.spec.declaration import Declaration, Specs, nest
from nanotrain.spec.kinds.attention import head_norms, output_gate, projected_attention
from nanotrain.spec.kinds.core_attention import core_attention
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Operators
from nanotrain.spec.params import Normal


def declare(declare: Declaration) -> Specs:
    """Projections of queries and of the output; the layer has no keys and values of its own."""
    shape = declare.shape
    hidden = shape.hidden_size
    has_bias = shape.has_qkv_bias
    query_size = shape.num_heads * shape.head_dim
    output_size = shape.num_heads * shape.value_head_dim
    specs: Specs = ()
    if shape.has_sink:
        init = Normal(shape.init_std)
        specs += (declare.head_vector("softmax_offset", shape.num_heads, init=init),)
    head = (shape.head_dim,)
    query = declare.column_linear(query_size, hidden, bias=has_bias, head_rows=head)
    specs += nest("query", query)
    if shape.has_output_gate:
        specs += nest("gate", output_gate(declare))
    specs += head_norms(declare, query_norm=query_size)
    output = declare.row_linear(hidden, output_size, bias=shape.has_output_bias)
    return specs + nest("output", output)


def operators(s: LayerSizes) -> Operators:
    """Projection, norm and rotary positions of queries, core attention, output."""
    shape = s.shape
    heads = shape.num_heads // s.tp
    groups = max(1, shape.query_groups // s.tp)
    core = core_attention(s, heads=heads, groups=groups)
    widths = {"query": heads * shape.head_dim}
    return projected_attention(s, widths, num_rotated_heads=heads, core=core)
