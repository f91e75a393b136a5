"""Gated DeltaNet and Kimi Delta Attention (KDA), the pure half of model/delta_net.py."""

import math
from collections.abc import Collection
from dataclasses import replace

from nanotrain.config.layer_kinds import LinearAttentionConfig
from nanotrain.spec.declaration import (
    ContextRank,
    Declaration,
    RankSizes,
    Specs,
    grouped,
    nest,
    summed,
)
from nanotrain.spec.params import Shard, Uniform
from nanotrain.spec.shape import ModelShape

FP32 = 4
CHUNK_SIZE = 64  # tokens of a chunk of the rule
DECAY_RATES = Uniform(1.0, 16.0, "log")  # of Mamba-2, as in Megatron-LM
STEPS = Uniform(math.log(1e-3), math.log(0.1), "inverse_softplus_of_exp")


def gated_delta_net(declare: Declaration) -> Specs:
    """A gate, a step of the decay and a step of the correction per token, all projected directly."""
    num_heads = _sizes(declare.shape).num_value_heads
    narrow = declare.narrow_linear(num_heads)
    gates = nest(
        "gate", declare.column_linear(_widths(declare.shape)[1], declare.shape.hidden_size)
    )
    return _declare(
        declare, gates + nest("step", narrow) + nest("beta", narrow), num_steps=num_heads
    )


def kda(declare: Declaration) -> Specs:
    """Gate and steps per channel, by projections of low rank; their first halves are on every tp
    rank.
    """
    (keys, values), hidden, sizes = (
        _widths(declare.shape),
        declare.shape.hidden_size,
        _sizes(declare.shape),
    )
    gates = nest("beta", declare.narrow_linear(sizes.num_value_heads))
    for name, width, rank in (
        ("gate", values, sizes.value_head_dim),
        ("step", keys, sizes.key_head_dim),
    ):
        gates += nest(f"{name}_down", declare.replicated_linear(rank, hidden))
        gates += nest(f"{name}_up", declare.column_linear(width, rank))
    return _declare(declare, gates, num_steps=keys)


def _declare(declare: Declaration, gates: Specs, *, num_steps: int) -> Specs:
    sizes, hidden, (keys, values) = (
        _sizes(declare.shape),
        declare.shape.hidden_size,
        _widths(declare.shape),
    )
    projections = {"query": keys, "key": keys, "value": values}
    decay, bias = (
        declare.vector("decay", sizes.num_value_heads),
        declare.vector("step_bias", num_steps),
    )
    norm = declare.vector("weight", sizes.value_head_dim, value=1.0)
    specs: Specs = tuple(
        replace(spec, init=init, shards=(Shard(0, "tp"),))
        for spec, init in ((decay, DECAY_RATES), (bias, STEPS))
    )
    for name, width in projections.items():
        specs += nest(name, declare.column_linear(width, hidden))
    for name, width in projections.items():
        specs += nest(f"{name}_conv", declare.convolution(width, sizes.conv_kernel_dim))
    # one weight for all heads, which tp shards
    specs += gates + nest("norm", grouped("norms", summed([norm], ("tp",))))
    return specs + nest("output", declare.row_linear(hidden, values))


def _sizes(shape: ModelShape) -> LinearAttentionConfig:
    assert shape.linear_attention is not None, "linear_attention_type is set"
    return shape.linear_attention


def _widths(shape: ModelShape) -> tuple[int, int]:
    """Channels of all query or key heads, and of all value heads."""
    sizes = _sizes(shape)
    return sizes.num_key_heads * sizes.key_head_dim, sizes.num_value_heads * sizes.value_head_dim


def sequence_flops(shape: ModelShape, layer: int, *, seq_length: int) -> int:
    """A state is read by key and query and corrected: three products of K x V per token and head."""
    sizes = _sizes(shape)
    return 6 * 3 * seq_length * sizes.num_value_heads * sizes.key_head_dim * sizes.value_head_dim


def cp_bytes(shape: ModelShape, rank: ContextRank) -> dict[str, tuple[int, int]]:
    """The tokens before each chunk for the convolutions, and the states or heads of the rule."""
    sizes, (keys, values) = _sizes(shape), _widths(shape)
    halo = rank.halo_bytes((sizes.conv_kernel_dim - 1) * (2 * keys + values))
    heads = (sizes.num_key_heads, sizes.key_head_dim), (sizes.num_value_heads, sizes.value_head_dim)
    num_decays = sizes.key_head_dim if "kda" in shape.mixers else 1
    return {"p2p": (halo, halo)} | rank.scan_bytes(
        *heads, transition=sizes.key_head_dim**2, num_decays=num_decays
    )


def working_bytes(rank: RankSizes) -> int:
    """Those of the rule without its kernels, which is computed again, in fp32: pairs of tokens,
    heads, and states.

    Within 5 % of what torch allocates for 27 pairs of sizes.
    """
    sizes = _sizes(rank.shape)
    key, value, heads = sizes.key_head_dim, sizes.value_head_dim, sizes.num_value_heads // rank.tp
    if "kda" in rank.shape.mixers:
        return rank.tokens * heads * (3 * CHUNK_SIZE + 37 * key + 7 * value) * FP32
    of_heads = heads * (6 * CHUNK_SIZE + 3 * key + 9 * (value + key * value // CHUNK_SIZE) // 2)
    return rank.tokens * (of_heads + sizes.num_key_heads // rank.tp * 6 * key) * FP32


def saved_bytes(rank: RankSizes, layer: int, *, modules: Collection[str]) -> int:
    """The convolutions and the rule keep their inputs and activations theirs; norm, gate and output
    projection too.
    """
    (keys, values), is_kda = (
        (width // rank.tp for width in _widths(rank.shape)),
        "kda" in rank.shape.mixers,
    )
    sizes, num_heads = _sizes(rank.shape), _sizes(rank.shape).num_value_heads // rank.tp
    num_steps = keys if is_kda else num_heads
    wide = 3 * (2 * keys + values) + (4 if is_kda else 5) * values
    compressed = rank.outside * (sizes.key_head_dim + sizes.value_head_dim) if is_kda else 0
    map_size = sizes.key_head_dim * (sizes.key_head_dim + sizes.value_head_dim)
    maps = (
        0
        if rank.cp_comm_type in (None, "a2a")
        else 2 * rank.cp * rank.batch_size * num_heads * map_size
    )
    in_fp32 = rank.tokens * (3 * num_steps + 2 * num_heads) + maps
    return (rank.tokens * wide + compressed) * rank.itemsize + in_fp32 * FP32
