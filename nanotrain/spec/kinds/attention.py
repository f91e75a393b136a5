"""Softmax attention: with grouped key/value heads, and multi-head latent attention (MLA).

attention, mla                        parameters
attention_operators, mla_operators    operators
attention_rows, mla_rows              rows of queries and keys that QK-clip scales
"""

from collections.abc import Mapping
from dataclasses import replace
from math import lcm

from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, norm, summed
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import (
    Attention,
    Gate,
    Norm,
    Operators,
    Product,
    Rotary,
    Saved,
    Sent,
)
from nanotrain.spec.params import Normal, ParamSpec, Shard
from nanotrain.spec.shape import ModelShape


def attention(declare: Declaration) -> Specs:
    """Multi-head attention with grouped key/value heads, which tp ranks may share."""
    shape = declare.shape
    hidden = shape.hidden_size
    has_bias = shape.has_qkv_bias
    query_size = shape.num_heads * shape.head_dim
    key_size = shape.query_groups * shape.head_dim
    value_size = shape.query_groups * shape.value_head_dim
    output_size = shape.num_heads * shape.value_head_dim
    key = declare.column_linear(key_size, hidden, bias=has_bias)
    value = declare.column_linear(value_size, hidden, bias=has_bias)
    if shape.replicates_kv_heads(declare.tensor_parallel_size):
        key = _replicated(key)
        value = _replicated(value)
    specs: Specs = ()
    if shape.has_sink:
        sink = declare.vector("softmax_offset", shape.num_heads)
        specs += (replace(sink, init=Normal(shape.init_std), shards=(Shard(0, "tp"),)),)
    specs += nest("query", declare.column_linear(query_size, hidden, bias=has_bias))
    specs += nest("key", key)
    specs += nest("value", value)
    if shape.has_output_gate:
        specs += nest("gate", declare.column_linear(output_size, hidden, bias=has_bias))
    specs += _query_key_norms(declare, query_size=query_size, key_size=key_size)
    output = declare.row_linear(hidden, output_size, bias=shape.has_linear_bias)
    return specs + nest("output", output)


def _replicated(specs: Specs) -> Specs:
    """The same parameters on every tp rank, each of which uses a part of the rows."""
    return tuple(replace(spec, shards=(), grad_sum_axes=("tp",)) for spec in specs)


def _query_key_norms(declare: Declaration, *, query_size: int, key_size: int) -> Specs:
    """Norms per head, as in Megatron-LM, or over all heads (OLMo 2); tp ranks have all weights."""
    shape = declare.shape
    specs: list[ParamSpec] = []
    if shape.has_qk_norm:
        per_head = summed(norm(declare, shape.head_dim), ("tp",))
        specs += nest("query_norm", per_head) + nest("key_norm", per_head)
    if shape.has_wide_qk_norm:
        for name, size in (("query_norm", query_size), ("key_norm", key_size)):
            wide = summed([declare.vector("weight", size, value=shape.norm_init)], ("tp",))
            specs += grouped("norms", nest(name, wide))
    return tuple(replace(spec, weight_decay=declare.decays_qk_norm) for spec in specs)


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
    if rank is None:
        specs = nest("query", declare.column_linear(query_size, hidden))
    else:
        specs = nest("query_down", declare.replicated_linear(rank, hidden))
        specs += nest("query_latent_norm", norm(declare, rank))
        specs += nest("query_up", declare.column_linear(query_size, rank))
    specs += nest("kv_down", declare.replicated_linear(kv_down_size, hidden))
    specs += nest("kv_latent_norm", norm(declare, compressed))
    specs += nest("kv_up", declare.column_linear(key_value_size, compressed))
    output_size = shape.num_heads * shape.value_head_dim
    return specs + nest("output", declare.row_linear(hidden, output_size))


def attention_operators(s: LayerSizes) -> Operators:
    """Projections, norms and rotary positions of queries and keys, core attention, output."""
    shape = s.shape
    heads = shape.num_heads // s.tp
    groups = max(1, shape.query_groups // s.tp)
    output = heads * shape.value_head_dim
    rotated = s.tokens * (heads + groups) * shape.head_dim
    widths = {
        "query": heads * shape.head_dim,
        "key": groups * shape.head_dim,
        "value": groups * shape.value_head_dim,
    }
    if shape.has_output_gate:
        widths["gate"] = output
    operators: Operators = [s.column(widths, saves=(s.layer_input,))]
    if shape.has_rotary:
        operators.append(Rotary(name="rope", numel=rotated))
    if shape.has_qk_norm or shape.qk_l2_norm or shape.has_wide_qk_norm:
        saves = (Saved(_saved_by_norms(s, num_heads=heads + groups)),)
        operators.append(
            Norm(name="qk_norm", numel=rotated, saves=saves, launches=2, backward_launches=4)
        )
    operators.append(core_attention(s, heads=heads, groups=groups))
    if shape.has_output_gate:
        gated = s.tokens * output  # the sigmoid of the gate, and its product with the output
        saves = (Saved(2 * gated * s.itemsize),)
        operators.append(Gate(name="output_gate", numel=gated, saves=saves))
    return [*operators, s.row(output)]


def _saved_by_norms(s: LayerSizes, *, num_heads: int) -> int:
    """Inputs and statistics of the norms of queries and keys."""
    shape = s.shape
    saved = 0
    if shape.has_qk_norm or shape.qk_l2_norm:
        saved += s.tokens * num_heads * (shape.head_dim * s.itemsize + FP32)
    if shape.has_wide_qk_norm:
        saved += s.tokens * num_heads * shape.head_dim * 2 * FP32
    return saved


def mla_operators(s: LayerSizes) -> Operators:
    """Compressed queries and keys, their norms, up-projections, core attention, output."""
    heads = s.shape.num_heads // s.tp
    core = core_attention(s, heads=heads, groups=heads)
    return [*compressed_projections(s), core, s.row(heads * s.shape.value_head_dim)]


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
    norm_inputs = Saved((compressed + s.outside * sizes.qk_pos_emb_head_dim) * s.itemsize)
    operators: Operators = []
    if query_rank:
        operators.append(down_projection(s, "query_down", outputs=query_rank))
    else:
        operators.append(s.column({"query": query_width}))
    operators += [
        down_projection(s, "kv_down", outputs=kv_down_width, saves=(s.layer_input,)),
        Norm(
            name="layernorm",
            numel=compressed,
            saves=(norm_inputs,),
            launches=2,
            backward_launches=4,
        ),
    ]
    if query_rank:
        operators.append(_up_projection(s, "query_up", outputs=query_width, inputs=query_rank))
    rotated = s.tokens * heads * 2 * shape.head_dim
    return [
        *operators,
        _up_projection(s, "kv_up", outputs=key_value_width, inputs=sizes.kv_lora_rank),
        Rotary(name="mla_up_proj", module="mla_up_proj", numel=rotated, passes=4),
    ]


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


def _up_projection(s: LayerSizes, name: str, *, outputs: int, inputs: int) -> Product:
    """A projection of compressed vectors, which it keeps."""
    return Product(
        name="mla_up_proj",
        module="mla_up_proj",
        weights=(f"{name}.weight",),
        rows=s.tokens,
        outputs=outputs,
        inputs=inputs,
        shard="column",
        saves=(Saved(s.outside * inputs * s.itemsize),),
    )


def core_attention(s: LayerSizes, *, heads: int, groups: int) -> Attention:
    """Scaled dot-product attention of the local heads.

    Args:
        s: sizes of the layer.
        heads: query heads of the tp rank.
        groups: key/value heads of the tp rank.
    """
    shape = s.shape
    sequence = s.seq_length * s.cp
    recomputed = _recomputed_core(s, heads=heads, groups=groups)
    kept = _kept_core(s, heads=heads, groups=groups)
    return Attention(
        name="core_attn",
        module="core_attn",
        batch=s.batch_size,
        heads=heads,
        kv_heads=groups,
        head_dim=shape.head_dim,
        value_head_dim=shape.value_head_dim,
        chunks=shape.attention_chunks(s.layer, seq_length=sequence),
        window=shape.window_size if shape.has_window(s.layer) else None,
        saves=recomputed + kept,
        over_cp=key_values_over_cp(s, heads=heads, groups=groups),
    )


def _recomputed_core(s: LayerSizes, *, heads: int, groups: int) -> tuple[Saved, ...]:
    """Inputs of a core attention that is recomputed, and its output for the layer that follows."""
    shape = s.shape
    key_value = shape.head_dim + shape.value_head_dim + _key_width_of_values(s)
    inputs = s.tokens * (heads * shape.head_dim + groups * key_value) * s.itemsize
    output = s.tokens * heads * shape.value_head_dim * s.itemsize
    return (
        Saved(inputs, dropped_by=("mla_up_proj",), only_with="core_attn"),
        Saved(output, only_with="core_attn"),
    )


def _key_width_of_values(s: LayerSizes) -> int:
    """Channels that a view of MLA's values keeps: those of the keys that kv_up returns too."""
    return 0 if s.shape.mla is None else s.shape.mla.qk_head_dim


def _kept_core(s: LayerSizes, *, heads: int, groups: int) -> tuple[Saved, ...]:
    """Query, key, value, output and its log-sum-exp; only the backend math keeps a mask."""
    shape = s.shape
    backend = s.attention_backend
    if backend == "math" and not shape.has_score_options:
        return (Saved(_written_scores(s, heads), dropped_by=("core_attn",)),)
    is_cpu_flash = s.device == "cpu" and backend == "sdpa flash"
    is_padded = backend == "sdpa flash" and shape.value_head_dim < shape.head_dim
    is_repeated = is_cpu_flash or backend == "sdpa efficient"
    is_local = s.cp_comm_type in (None, "p2p")  # keys and values of the rank's own tokens
    value_dim = shape.head_dim if is_padded else shape.value_head_dim
    output = value_dim
    if is_padded or s.cp_comm_type in ("allgather", "a2a"):
        output += shape.value_head_dim  # the next layer keeps it again: sliced, joined or sent
    if is_repeated and not (is_cpu_flash and s.itemsize == FP32):
        groups = heads  # key/value heads are repeated in 16 bits
    if is_local and not is_repeated and not is_padded:
        value_dim += _key_width_of_values(s)
    key_value = groups * (shape.head_dim + value_dim)
    if s.cp_comm_type == "allgather":
        key_value *= s.cp
    head_tokens = s.tokens * heads
    dropped_by = ("core_attn",)
    dropped_with_query = dropped_by if s.cp_comm_type == "a2a" else ("core_attn", "mla_up_proj")
    dropped_with_keys = ("core_attn", "mla_up_proj") if is_local else dropped_by
    saves = [
        Saved(head_tokens * shape.head_dim * s.itemsize, dropped_by=dropped_with_query),
        Saved(s.tokens * key_value * s.itemsize, dropped_by=dropped_with_keys),
        Saved(head_tokens * (output * s.itemsize + FP32), dropped_by=dropped_by),
    ]
    if is_padded and s.cp_comm_type is None:  # a padded value is a copy
        copy = head_tokens * shape.head_dim * s.itemsize
        saves.append(Saved(copy, dropped_by=dropped_by, only_with="mla_up_proj"))
    return tuple(saves)


def _written_scores(s: LayerSizes, heads: int) -> int:
    """The backend math: inputs and the weights of all pairs in fp32, and the output."""
    shape = s.shape
    num_keys = s.seq_length * s.cp
    copies = 1.0
    if s.cp_comm_type == "allgather":  # two chunks of queries attend to 2 cp + 1 chunks of keys
        num_keys = num_keys * (2 * s.cp + 1) // (4 * s.cp)
        copies = s.cp + 0.5
    inputs = shape.head_dim + copies * (shape.head_dim + shape.value_head_dim)
    per_head = (inputs + num_keys) * FP32 + shape.value_head_dim * s.itemsize
    return s.tokens * heads * int(per_head)


def key_values_over_cp(s: LayerSizes, *, heads: int, groups: int) -> tuple[Sent, ...]:
    """Keys and values, or with Ulysses heads, and their gradients."""
    # elements of a head of keys and of values
    head = s.tokens * (s.shape.head_dim + s.shape.value_head_dim)
    key_values = (s.cp - 1) * head * groups * s.itemsize
    if s.cp_comm_type == "allgather":
        return Sent("all_gather", key_values, 0), Sent("reduce_scatter", 0, key_values)
    if s.cp_comm_type == "p2p":
        # in a ring gradients take one step more, in fp32
        grads = key_values + s.cp * head * groups * max(FP32, s.itemsize)
        return (Sent("p2p", key_values, grads),)
    if s.cp_comm_type == "a2a":
        # key/value heads are repeated until cp divides them
        elements = head * (heads + lcm(groups, s.cp))
        sent = elements * s.itemsize * (s.cp - 1) // s.cp
        return (Sent("all_to_all", sent, sent),)
    return ()


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
