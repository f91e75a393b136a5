"""Softmax attention: with grouped key/value heads, and multi-head latent attention (MLA)."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from math import lcm

from nanotrain.spec.declaration import (
    ContextRank,
    Declaration,
    RankSizes,
    Specs,
    grouped,
    nest,
    norm,
    summed,
)
from nanotrain.spec.params import Normal, Shard
from nanotrain.spec.shape import ModelShape

FP32 = 4


def attention(declare: Declaration) -> Specs:
    """Multi-head attention with grouped key/value heads; several tp ranks may share a replicated
    head.
    """
    shape = declare.shape
    query_size, key_size = shape.num_heads * shape.head_dim, shape.query_groups * shape.head_dim
    output_size, sizes = (
        shape.num_heads * shape.value_head_dim,
        (key_size, shape.query_groups * shape.value_head_dim),
    )
    key, value = (
        declare.column_linear(size, shape.hidden_size, bias=shape.has_qkv_bias) for size in sizes
    )
    if shape.replicates_kv_heads(declare.tensor_parallel_size):
        whole = partial(replace, shards=(), grad_sum_axes=("tp",))
        key, value = tuple(map(whole, key)), tuple(map(whole, value))
    specs: Specs = ()
    if shape.has_sink:
        sink = declare.vector("softmax_offset", shape.num_heads)
        specs = (replace(sink, init=Normal(shape.init_std), shards=(Shard(0, "tp"),)),)
    specs += nest(
        "query", declare.column_linear(query_size, shape.hidden_size, bias=shape.has_qkv_bias)
    )
    specs += nest("key", key) + nest("value", value)
    if shape.has_output_gate:
        specs += nest(
            "gate", declare.column_linear(output_size, shape.hidden_size, bias=shape.has_qkv_bias)
        )
    norms: Specs = ()
    if shape.has_qk_norm:
        # of the kind of the other norms, as in Megatron-LM; applied to the heads of each tp rank
        per_head = summed(norm(declare, shape.head_dim), ("tp",))
        norms = nest("query_norm", per_head) + nest("key_norm", per_head)
    if shape.has_wide_qk_norm:  # OLMo 2; each tp rank has all weights and uses those of its heads
        for name, size in (("query_norm", query_size), ("key_norm", key_size)):
            wide = summed([declare.vector("weight", size, value=shape.norm_init)], ("tp",))
            norms += grouped("norms", nest(name, wide))
    specs += tuple(replace(spec, weight_decay=declare.decays_qk_norm) for spec in norms)
    return specs + nest(
        "output", declare.row_linear(shape.hidden_size, output_size, bias=shape.has_linear_bias)
    )


def mla(declare: Declaration) -> Specs:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): replicated down-projections, sharded
    up-projections.
    """
    shape = declare.shape
    assert shape.mla is not None, "a model without latent attention declares `attention`"
    hidden, rank, compressed = shape.hidden_size, shape.mla.q_lora_rank, shape.mla.kv_lora_rank
    query_size = shape.num_heads * shape.head_dim
    if rank is None:
        specs = nest("query", declare.column_linear(query_size, hidden))
    else:
        specs = nest("query_down", declare.replicated_linear(rank, hidden))
        specs += nest("query_latent_norm", norm(declare, rank))
        specs += nest("query_up", declare.column_linear(query_size, rank))
    key_value_size = shape.num_heads * (shape.mla.qk_head_dim + shape.value_head_dim)
    return (
        *specs,
        *nest(
            "kv_down", declare.replicated_linear(compressed + shape.mla.qk_pos_emb_head_dim, hidden)
        ),
        *nest("kv_latent_norm", norm(declare, compressed)),
        *nest("kv_up", declare.column_linear(key_value_size, compressed)),
        *nest("output", declare.row_linear(hidden, shape.num_heads * shape.value_head_dim)),
    )


def attention_bytes(rank: RankSizes, layer: int, *, modules: Collection[str]) -> int:
    """The inputs of the norms of queries and keys, and the core attention."""
    shape = rank.shape.of_layer(layer)
    heads, groups = shape.num_heads // rank.tp, max(1, shape.query_groups // rank.tp)
    has_norms = shape.has_qk_norm or shape.qk_l2_norm
    normed = (heads + groups) * (shape.head_dim * rank.itemsize + FP32) if has_norms else 0
    normed += (heads + groups) * shape.head_dim * 2 * FP32 if shape.has_wide_qk_norm else 0
    # the sigmoid of the gate, and its product with the output
    gated = 2 * heads * shape.value_head_dim * rank.itemsize if shape.has_output_gate else 0
    return rank.tokens * (normed + gated) + rank.core_attention(
        layer, (heads, groups), modules=modules
    )


def mla_bytes(rank: RankSizes, layer: int, *, modules: Collection[str]) -> int:
    """The compressed vectors before and after their norms, and the core attention."""
    mla, heads = rank.shape.mla, rank.shape.num_heads // rank.tp
    assert mla is not None, "a layer of MLA has its sizes"
    compressed = 2 * (mla.q_lora_rank or 0) + 2 * mla.kv_lora_rank + mla.qk_pos_emb_head_dim
    kept = rank.core_attention(layer, (heads, heads), modules=modules)
    return rank.outside * compressed * rank.itemsize + kept


def pair_flops(shape: ModelShape, layer: int, *, seq_length: int) -> int:
    """Causal attention: half of the S x S pairs in the scores and in the weighted sum of values, or
    the window's.
    """
    window, pairs = shape.window_size if shape.has_window(layer) else None, 0
    for number, length in shape.attention_lengths(layer, seq_length=seq_length):
        seen = length if window is None else min(window, length)
        pairs += number * seen * (2 * length - seen)  # twice their number; S^2 without a window
    return 3 * shape.num_heads * (shape.head_dim + shape.value_head_dim) * pairs


Rows = Mapping[str, tuple[tuple[str, int], ...]]


def attention_rows(shape: ModelShape) -> Rows:
    """QK-clip: the rows of query and key, of weights and biases."""
    width = shape.head_dim
    names = (("query", "query"), ("key", "key"))
    return {
        f"{name}.{leaf}": ((heads, width),) for name, heads in names for leaf in ("weight", "bias")
    }


def mla_rows(shape: ModelShape) -> Rows:
    """QK-clip: channels without position are scaled in both, rotary ones, whose key is shared, in
    the query alone.
    """
    assert (mla := shape.mla) is not None, "a layer of MLA has its sizes"
    query = (("query", mla.qk_head_dim), ("both", mla.qk_pos_emb_head_dim))
    key = (("key", mla.qk_head_dim), ("none", shape.value_head_dim))
    return {"query.weight": query, "query_up.weight": query, "kv_up.weight": key}


def cp_bytes(shape: ModelShape, rank: ContextRank) -> dict[str, tuple[int, int]]:
    """Keys and values, or with Ulysses heads, and their gradients; nothing for a way that is added
    from outside.
    """
    heads, groups = shape.num_heads // rank.tp, max(1, shape.query_groups // rank.tp)
    # elements of a head of keys and of values
    row = rank.num_positions * (shape.head_dim + shape.value_head_dim)
    key_values = (rank.size - 1) * row * groups * rank.itemsize
    # in a ring gradients take one step more, in fp32
    grads = key_values + rank.size * row * groups * max(FP32, rank.itemsize)
    # key/value heads are repeated until cp divides them
    all_to_all = (
        row * (heads + lcm(groups, rank.size)) * rank.itemsize * (rank.size - 1) // rank.size
    )
    by_type = {
        "allgather": {"all_gather": (key_values, 0), "reduce_scatter": (0, key_values)},
        "p2p": {"p2p": (key_values, grads)},
        "a2a": {"all_to_all": (all_to_all, all_to_all)},
    }
    return by_type.get(rank.comm_type, {})
