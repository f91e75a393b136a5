"""Softmax attention: with grouped key/value heads, and multi-head latent attention (MLA).

attention, mla                        parameters
attention_operators, mla_operators    operators
attention_rows, mla_rows              rows of queries and keys that QK-clip scales
"""

from collections.abc import Mapping
from dataclasses import replace

from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, norm, summed
from nanotrain.spec.kinds.core_attention import core_attention, query_key_modules
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import (
    POINTWISE,
    Attention,
    Gate,
    Norm,
    Operators,
    Product,
    Rotary,
    Saved,
)
from nanotrain.spec.params import Normal, ParamSpec
from nanotrain.spec.shape import ModelShape

NUM_WIDE_NORMS = 2  # one over all query heads, one over all key heads


def attention(declare: Declaration) -> Specs:
    """Multi-head attention with grouped key/value heads, which tp ranks may share."""
    shape = declare.shape
    hidden = shape.hidden_size
    has_bias = shape.has_qkv_bias
    query_size = shape.num_heads * shape.head_dim
    key_size = shape.query_groups * shape.head_dim
    value_size = shape.query_groups * shape.value_head_dim
    output_size = shape.num_heads * shape.value_head_dim
    head = (shape.head_dim,)
    query = declare.column_linear(query_size, hidden, bias=has_bias, head_rows=head)
    key = declare.column_linear(key_size, hidden, bias=has_bias, head_rows=head)
    value_head = (shape.value_head_dim,)
    value = declare.column_linear(value_size, hidden, bias=has_bias, head_rows=value_head)
    if shape.replicates_kv_heads(declare.tensor_parallel_size):
        key = replicated(key)
        value = replicated(value)
    specs: Specs = ()
    if shape.has_sink:
        init = Normal(shape.init_std)
        specs += (declare.head_vector("softmax_offset", shape.num_heads, init=init),)
    specs += nest("query", query)
    specs += nest("key", key)
    if not shape.attention_k_eq_v:
        specs += nest("value", value)
    if shape.has_output_gate:
        specs += nest("gate", output_gate(declare))
    specs += head_norms(declare, query_norm=query_size, key_norm=key_size)
    output = declare.row_linear(hidden, output_size, bias=shape.has_output_bias)
    return specs + nest("output", output)


def output_gate(declare: Declaration) -> Specs:
    """The projection to gates of the outputs: one channel or as many as a head has."""
    shape = declare.shape
    channels = shape.gate_channels
    head_rows = (channels,) if channels > 1 else ()
    return declare.column_linear(
        shape.num_heads * channels,
        shape.hidden_size,
        bias=shape.has_qkv_bias,
        head_rows=head_rows,
    )


def replicated(specs: Specs) -> Specs:
    """The same parameters on every tp rank, each of which uses a part of the rows."""
    return tuple(replace(spec, shards=(), grad_sum_axes=("tp",)) for spec in specs)


def head_norms(declare: Declaration, **size_of_norm: int) -> Specs:
    """Norms of queries or keys; tp ranks have all weights.

    Args:
        declare: sizes; norms per head, as in Megatron-LM, or over all heads (OLMo 2).
        size_of_norm: channels of all heads, by the name of the norm.
    """
    shape = declare.shape
    specs: list[ParamSpec] = []
    for name, size in size_of_norm.items():
        if shape.has_qk_norm:
            specs += nest(name, summed(norm(declare, shape.head_dim), ("tp",)))
        if shape.has_wide_qk_norm:
            wide = summed([declare.vector("weight", size, value=shape.norm_init)], ("tp",))
            specs += grouped("norms", nest(name, wide))
    decays = declare.decays_qk_norm or declare.decays_vectors
    return tuple(replace(spec, weight_decay=decays) for spec in specs)


def mla(declare: Declaration) -> Specs:
    """Multi-head latent attention (DeepSeek-V2, section 2.1); down-projections are replicated."""
    shape = declare.shape
    assert shape.mla is not None, "a model without latent attention declares `attention`"
    hidden = shape.hidden_size
    rank = shape.mla.q_lora_rank
    compressed = shape.mla.kv_lora_rank
    query_size = shape.num_heads * shape.head_dim
    key_value_size = shape.num_heads * (shape.mla.qk_head_dim + shape.value_head_dim)
    kv_down_size = compressed + shape.mla.qk_pos_emb_head_dim
    query_head = (shape.mla.qk_head_dim, shape.mla.qk_pos_emb_head_dim)
    key_value_head = (shape.mla.qk_head_dim, shape.value_head_dim)
    if rank is None:
        specs = nest("query", declare.column_linear(query_size, hidden, head_rows=query_head))
    else:
        specs = nest("query_down", declare.replicated_linear(rank, hidden))
        specs += nest("query_latent_norm", norm(declare, rank))
        specs += nest("query_up", declare.column_linear(query_size, rank, head_rows=query_head))
    specs += nest("kv_down", declare.replicated_linear(kv_down_size, hidden))
    specs += nest("kv_latent_norm", norm(declare, compressed))
    kv_up = declare.column_linear(key_value_size, compressed, head_rows=key_value_head)
    specs += nest("kv_up", kv_up)
    if shape.has_output_gate:
        specs += nest("gate", output_gate(declare))
    output_size = shape.num_heads * shape.value_head_dim
    output = declare.row_linear(hidden, output_size, bias=shape.has_output_bias)
    return specs + nest("output", output)


def attention_operators(s: LayerSizes) -> Operators:
    """Projections, norms and rotary positions of queries and keys, core attention, output."""
    shape = s.shape
    heads = shape.num_heads // s.tp
    groups = max(1, shape.query_groups // s.tp)
    widths = {
        "query": heads * shape.head_dim,
        "key": groups * shape.head_dim,
    }
    if not shape.attention_k_eq_v:
        widths["value"] = groups * shape.value_head_dim
    core = core_attention(s, heads=heads, groups=groups)
    operators = projected_attention(s, widths, num_rotated_heads=heads + groups, core=core)
    if shape.value_l2_norm:
        operators.insert(1, _value_norm(s, groups=groups))
    return operators


def _value_norm(s: LayerSizes, *, groups: int) -> Norm:
    """The norm of values, which saves its input, unless the norm of keys has saved it already."""
    numel = s.tokens * groups * s.shape.value_head_dim
    saves: tuple[Saved, ...] = (Saved(s.tokens * groups * FP32),)
    if not (s.shape.attention_k_eq_v and s.shape.has_qk_norm):
        saves += (Saved(numel * s.itemsize),)
    return Norm(name="value_norm", numel=numel, saves=saves)


def projected_attention(
    s: LayerSizes, widths: dict[str, int], *, num_rotated_heads: int, core: Attention
) -> Operators:
    """Operators of projected heads.

    Args:
        s: sizes of the layer.
        widths: local widths of the projections, without the gate.
        num_rotated_heads: local heads that are normalized and rotated.
        core: the core attention.
    """
    shape = s.shape
    output = core.heads * shape.value_head_dim
    rotated = s.tokens * num_rotated_heads * shape.head_dim
    gate_width = core.heads * shape.gate_channels
    if shape.has_output_gate:
        widths = widths | {"gate": gate_width}
    again = query_key_modules(shape)
    column = s.column(widths, saves=(s.projected_input,), casts_norm=s.casts_norm)
    operators: Operators = [column]
    if shape.has_rotary:
        operators.append(Rotary(name="rope", recomputed_by=again, numel=rotated))
    if shape.has_qk_norm or shape.qk_l2_norm or shape.has_wide_qk_norm:
        norms = Norm(
            name="qk_norm",
            recomputed_by=again,
            numel=rotated,
            saves=_saved_by_norms(s, num_heads=num_rotated_heads),
            launches=2,
            backward_launches=4,
        )
        operators.append(norms)
    operators.append(core)
    if shape.has_output_gate:
        operators.append(_gate_operator(s, heads=core.heads))
    return [*operators, s.row(output)]


def _gate_operator(s: LayerSizes, *, heads: int) -> Gate:
    """The product of the outputs of heads with their gates."""
    shape = s.shape
    numel = s.tokens * heads * shape.value_head_dim
    gate_numel = s.tokens * heads * shape.gate_channels
    # the activation of the gate, and the output that it multiplies
    saved_numel = numel + gate_numel
    if shape.attention_output_gate_activation == "softplus":
        saved_numel += gate_numel  # the gate, from which torch computes the derivative
    gated = Saved(saved_numel * s.itemsize, dropped_by=(POINTWISE,))
    gate = Saved(gate_numel * s.itemsize, only_with=POINTWISE)
    return Gate(name="output_gate", recomputed_by=(POINTWISE,), numel=numel, saves=(gated, gate))


def _saved_by_norms(s: LayerSizes, *, num_heads: int) -> tuple[Saved, ...]:
    """Inputs and statistics of the norms of queries and keys."""
    shape = s.shape
    rows = s.tokens * num_heads
    width = shape.head_dim
    saves: tuple[Saved, ...] = ()
    if shape.has_qk_norm or shape.qk_l2_norm:
        extra = s.norm_extra(width) if shape.has_qk_norm else FP32
        inputs = Saved(rows * width * s.itemsize)
        saves += (inputs, Saved(rows * extra, dropped_by=query_key_modules(shape)))
    if shape.has_wide_qk_norm:  # the input in fp32, before and after its factor per token
        saves += (Saved(s.tokens * (num_heads * width * 2 + NUM_WIDE_NORMS) * FP32),)
    return saves


def mla_operators(s: LayerSizes) -> Operators:
    """Compressed queries and keys, their norms, up-projections, core attention, output."""
    heads = s.shape.num_heads // s.tp
    core = core_attention(s, heads=heads, groups=heads)
    operators = [*compressed_projections(s), core]
    if s.shape.has_output_gate:
        operators.append(s.column({"gate": heads * s.shape.gate_channels}))
        operators.append(_gate_operator(s, heads=heads))
    return [*operators, s.row(heads * s.shape.value_head_dim)]


def compressed_projections(s: LayerSizes) -> Operators:
    """Down-projections, norms of the compressed vectors, up-projections and rotary positions."""
    shape = s.shape
    sizes = shape.mla
    assert sizes is not None, "a layer of MLA has its sizes"
    heads = shape.num_heads // s.tp
    query_rank = sizes.q_lora_rank or 0
    query_width = heads * shape.head_dim
    key_value_width = heads * (sizes.qk_head_dim + shape.value_head_dim)
    kv_down_width = sizes.kv_lora_rank + sizes.qk_pos_emb_head_dim
    compressed = s.outside * (query_rank + sizes.kv_lora_rank)
    inputs = compressed + s.outside * sizes.qk_pos_emb_head_dim
    extra = s.norm_extra(sizes.kv_lora_rank)
    if query_rank:
        extra += s.norm_extra(query_rank)
    saves = (Saved(inputs * s.itemsize), Saved(s.outside * extra))
    operators: Operators = []
    if query_rank:
        operators.append(down_projection(s, "query_down", outputs=query_rank))
    else:
        operators.append(s.column({"query": query_width}))
    operators.append(down_projection(s, "kv_down", outputs=kv_down_width, saves=(s.layer_input,)))
    norms = Norm(name="layernorm", numel=compressed, saves=saves, launches=2, backward_launches=4)
    operators.append(norms)
    module = "mla_up_proj"
    if query_rank:
        query_up = up_projection(
            s, "query_up", outputs=query_width, inputs=query_rank, module=module
        )
        operators.append(query_up)
    key_value_up = up_projection(
        s, "kv_up", outputs=key_value_width, inputs=sizes.kv_lora_rank, module=module
    )
    rotated = s.tokens * heads * 2 * shape.head_dim
    rotary = Rotary(name=module, module=module, numel=rotated, passes=4)
    return [*operators, key_value_up, rotary]


def down_projection(
    s: LayerSizes, name: str, *, outputs: int, saves: tuple[Saved, ...] = ()
) -> Product:
    """A replicated projection of the layer's input."""
    return Product(
        name=name,
        weights=(f"{name}.weight",),
        rows=s.outside,
        outputs=outputs,
        inputs=s.shape.hidden_size,
        saves=saves,
    )


def up_projection(
    s: LayerSizes, name: str, *, outputs: int, inputs: int, module: str = ""
) -> Product:
    """A projection of compressed vectors, which it keeps.

    Args:
        s: sizes of the layer.
        name: name of the projection in the layer.
        outputs: local width of the result.
        inputs: width of the compressed vectors.
        module: recompute module that runs it again.
    """
    compressed = Saved(s.outside * inputs * s.itemsize)
    return Product(
        name=module or "column",
        module=module,
        weights=(f"{name}.weight",),
        rows=s.tokens,
        outputs=outputs,
        inputs=inputs,
        shard="column",
        saves=(compressed,),
    )


Rows = Mapping[str, tuple[tuple[str, int], ...]]


def attention_rows(shape: ModelShape) -> Rows:
    """QK-clip: the rows of query and key, of weights and biases."""
    rows = {}
    for name in ("query", "key"):
        for leaf in ("weight", "bias"):
            rows[f"{name}.{leaf}"] = ((name, shape.head_dim),)
    return rows


def mla_rows(shape: ModelShape) -> Rows:
    """QK-clip: rotary channels, whose key is shared, are scaled in the query alone."""
    sizes = shape.mla
    assert sizes is not None, "a layer of MLA has its sizes"
    query = (("query", sizes.qk_head_dim), ("both", sizes.qk_pos_emb_head_dim))
    key = (("key", sizes.qk_head_dim), ("none", shape.value_head_dim))
    return {"query.weight": query, "query_up.weight": query, "kv_up.weight": key}
