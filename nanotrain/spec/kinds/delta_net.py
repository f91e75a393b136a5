"""Gated DeltaNet and Kimi Delta Attention (KDA): parameters and operators; the modules are in
model/delta_net.py.

    gated_delta_net, kda    parameters
    operators               operators of both
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from nanotrain.config.layer_kinds import LinearAttentionConfig
from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, summed
from nanotrain.spec.kinds.attention import down_projection
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import (
    Convolution,
    Gate,
    Norm,
    Operators,
    Product,
    Saved,
    Scan,
    ScanCost,
)
from nanotrain.spec.over_cp import Heads, halo, scan_sent
from nanotrain.spec.params import Shard, Uniform
from nanotrain.spec.shape import ModelShape

CHUNK_SIZE = 64  # tokens of a chunk of the rule
DECAY_RATES = Uniform(1.0, 16.0, "log")  # as in Mamba-2 of Megatron-LM
STEPS = Uniform(math.log(1e-3), math.log(0.1), "inverse_softplus_of_exp")


def gated_delta_net(declare: Declaration) -> Specs:
    """A gate per channel, and a step and a correction per head, projected directly."""
    shape = declare.shape
    num_heads = _sizes(shape).num_value_heads
    width = _widths(shape)["value"]
    narrow = declare.narrow_linear(num_heads)
    gates = nest("gate", declare.column_linear(width, shape.hidden_size))
    gates += nest("step", narrow)
    gates += nest("beta", narrow)
    return _declare(declare, gates, num_steps=num_heads)


def kda(declare: Declaration) -> Specs:
    """Gate and steps per channel by projections of low rank, whose first halves are replicated."""
    shape = declare.shape
    sizes = _sizes(shape)
    widths = _widths(shape)
    gates = nest("beta", declare.narrow_linear(sizes.num_value_heads))
    gates += _low_rank(declare, "gate", width=widths["value"], rank=sizes.value_head_dim)
    gates += _low_rank(declare, "step", width=widths["key"], rank=sizes.key_head_dim)
    return _declare(declare, gates, num_steps=widths["key"])


def _low_rank(declare: Declaration, name: str, *, width: int, rank: int) -> Specs:
    """A projection as a product of two."""
    down = declare.replicated_linear(rank, declare.shape.hidden_size)
    up = declare.column_linear(width, rank)
    return nest(f"{name}_down", down) + nest(f"{name}_up", up)


def _declare(declare: Declaration, gates: Specs, *, num_steps: int) -> Specs:
    """Decays, projections with their convolutions, gates, norm and output."""
    shape = declare.shape
    sizes = _sizes(shape)
    widths = _widths(shape)
    hidden = shape.hidden_size
    decay = declare.vector("decay", sizes.num_value_heads)
    bias = declare.vector("step_bias", num_steps)
    specs: Specs = (
        replace(decay, init=DECAY_RATES, shards=(Shard(0, "tp"),)),
        replace(bias, init=STEPS, shards=(Shard(0, "tp"),)),
    )
    for name, width in widths.items():
        specs += nest(name, declare.column_linear(width, hidden))
    for name, width in widths.items():
        specs += nest(f"{name}_conv", declare.convolution(width, sizes.conv_kernel_dim))
    # one weight for all heads, which tp shards
    norm = summed([declare.vector("weight", sizes.value_head_dim, value=1.0)], ("tp",))
    specs += gates
    specs += nest("norm", grouped("norms", norm))
    return specs + nest("output", declare.row_linear(hidden, widths["value"]))


def _sizes(shape: ModelShape) -> LinearAttentionConfig:
    assert shape.linear_attention is not None, "linear_attention_type is set"
    return shape.linear_attention


def _widths(shape: ModelShape) -> dict[str, int]:
    """Channels of all heads."""
    sizes = _sizes(shape)
    keys = sizes.num_key_heads * sizes.key_head_dim
    return {"query": keys, "key": keys, "value": sizes.num_value_heads * sizes.value_head_dim}


def gated_delta_net_operators(s: LayerSizes) -> Operators:
    """Gated DeltaNet: one product for all projections."""
    widths = {name: width // s.tp for name, width in _widths(s.shape).items()}
    heads = _sizes(s.shape).num_value_heads // s.tp
    projected = {**widths, "gate": widths["value"], "step": heads, "beta": heads}
    # the gate, its activation and the product
    gated = 3 * s.tokens * widths["value"] * s.itemsize
    return [
        s.column(projected, saves=(s.layer_input,)),
        *_rule_operators(s, widths, num_steps=heads),
        Gate(name="output_gate", numel=s.tokens * widths["value"], saves=(Saved(gated),)),
        s.row(widths["value"]),
    ]


def kda_operators(s: LayerSizes) -> Operators:
    """KDA: the first halves of the gate and of the steps are replicated."""
    sizes = _sizes(s.shape)
    widths = {name: width // s.tp for name, width in _widths(s.shape).items()}
    heads = sizes.num_value_heads // s.tp
    gated = 2 * s.tokens * widths["value"] * s.itemsize
    return [
        s.column({**widths, "beta": heads}, saves=(s.layer_input,)),
        down_projection(s, "gate_down", outputs=sizes.value_head_dim),
        down_projection(s, "step_down", outputs=sizes.key_head_dim),
        _up_projection(s, "gate_up", outputs=widths["value"], inputs=sizes.value_head_dim),
        _up_projection(s, "step_up", outputs=widths["key"], inputs=sizes.key_head_dim),
        *_rule_operators(s, widths, num_steps=widths["key"]),
        Gate(name="output_gate", numel=s.tokens * widths["value"], saves=(Saved(gated),)),
        s.row(widths["value"]),
    ]


def _up_projection(s: LayerSizes, name: str, *, outputs: int, inputs: int) -> Product:
    """The second half of a projection of low rank, which keeps its input."""
    return Product(
        name="column",
        weights=(f"{name}.weight",),
        rows=s.tokens,
        outputs=outputs,
        inputs=inputs,
        shard="column",
        saves=(Saved(s.outside * inputs * s.itemsize),),
    )


def _rule_operators(s: LayerSizes, widths: Mapping[str, int], *, num_steps: int) -> Operators:
    """Convolutions, the delta rule and the norm of its outputs.

    Args:
        s: sizes of the layer.
        widths: local channels of queries, keys and values.
        num_steps: steps of the decay per token.
    """
    channels = sum(widths.values())
    kernel_size = _sizes(s.shape).conv_kernel_dim
    outputs = s.tokens * widths["value"]
    convolutions = Convolution(
        name="conv",
        weights=tuple(f"{name}_conv.weight" for name in widths),
        rows=s.tokens,
        channels=channels,
        kernel_size=kernel_size,
        # inputs, outputs and activations
        saves=(Saved(3 * s.tokens * channels * s.itemsize),),
        over_cp=halo(s, channels=channels, kernel_size=kernel_size),
    )
    norm = Norm(name="linear_norm", numel=outputs, saves=(Saved(2 * outputs * s.itemsize),))
    return [convolutions, _scan(s, num_steps=num_steps), norm]


def _scan(s: LayerSizes, *, num_steps: int) -> Scan:
    """The gated delta rule (attention/delta_rule.py)."""
    sizes = _sizes(s.shape)
    is_kda = "kda" in s.shape.mixers
    heads = sizes.num_value_heads // s.tp
    groups = sizes.num_key_heads // s.tp
    key = sizes.key_head_dim
    value = sizes.value_head_dim
    saved = s.tokens * (3 * num_steps + 2 * heads)
    if s.cp_comm_type not in (None, "a2a"):
        saved += 2 * s.cp * s.batch_size * heads * key * (key + value)  # maps of all chunks
    per_token = _channel_elements(s) if is_kda else _head_elements(s)
    return Scan(
        name="delta_rule",
        saves=(Saved(saved * FP32),),
        working=s.tokens * per_token.working * FP32,
        over_cp=scan_sent(
            s,
            keys=Heads(groups, key),
            values=Heads(heads, value),
            transition=key**2,
            num_decays=key if is_kda else 1,
        ),
        recurrence_flops=6 * s.tokens * heads * key * value,
        fused_bytes=_fused_bytes(s),
        forward=_forward_cost(s, per_token),
        backward=_backward_cost(s, per_token),
    )


def _fused_bytes(s: LayerSizes) -> int:
    """Queries, keys, values and outputs, and the states of the chunks in fp32."""
    sizes = _sizes(s.shape)
    heads = sizes.num_value_heads // s.tp
    groups = sizes.num_key_heads // s.tp
    elements = 2 * (groups * sizes.key_head_dim + heads * sizes.value_head_dim)
    states = 2 * heads * sizes.key_head_dim * sizes.value_head_dim // CHUNK_SIZE
    return s.tokens * (elements * s.itemsize + states * FP32)


class _Elements(NamedTuple):
    """Elements in fp32 per token of the torch implementation, which computes chunks in a loop."""

    forward: int  # read and written by all operators
    backward: int  # read and written by all operators, the forward that runs again included
    working: int  # allocated at once in the backward: within 5 % for 27 pairs of sizes


def _head_elements(s: LayerSizes) -> _Elements:
    """Decays per head."""
    sizes = _sizes(s.shape)
    heads = sizes.num_value_heads // s.tp
    groups = sizes.num_key_heads // s.tp
    key = sizes.key_head_dim
    value = sizes.value_head_dim
    state = key * value // CHUNK_SIZE
    forward = 13 * CHUNK_SIZE + 10 * key + 25 * value + 8 * state
    backward = 53 * CHUNK_SIZE + 39 * key + 41 * value + 33 * state
    working = 6 * CHUNK_SIZE + 3 * key + 9 * (value + state) // 2
    return _Elements(
        forward=heads * forward + groups * 29 * key,
        backward=heads * backward + groups * (69 * key + 42 * CHUNK_SIZE),
        working=heads * working + groups * 6 * key,
    )


def _channel_elements(s: LayerSizes) -> _Elements:
    """Decays per channel of a key (KDA)."""
    sizes = _sizes(s.shape)
    heads = sizes.num_value_heads // s.tp
    key = sizes.key_head_dim
    value = sizes.value_head_dim
    return _Elements(
        forward=heads * (177 * key + 34 * value),
        backward=heads * (14 * CHUNK_SIZE + 765 * key + 62 * value),
        working=heads * (3 * CHUNK_SIZE + 37 * key + 7 * value),
    )


def _forward_cost(s: LayerSizes, per_token: _Elements) -> ScanCost:
    """Products of a state per chunk, and of pairs of tokens."""
    sizes = _sizes(s.shape)
    is_kda = "kda" in s.shape.mixers
    heads = sizes.num_value_heads // s.tp
    pair_heads = heads if is_kda else sizes.num_key_heads // s.tp
    key = sizes.key_head_dim
    value = sizes.value_head_dim
    flops = heads * (6 * key * value + 2 * CHUNK_SIZE * value)
    flops += pair_heads * (2 if is_kda else 4) * CHUNK_SIZE * key
    num_chunks = s.seq_length // CHUNK_SIZE
    return ScanCost(
        flops=s.tokens * flops,
        num_bytes=s.tokens * per_token.forward * FP32,
        launches=(161 if is_kda else 47) + 4 * num_chunks,
    )


def _backward_cost(s: LayerSizes, per_token: _Elements) -> ScanCost:
    """The forward again, and the gradients of its products."""
    sizes = _sizes(s.shape)
    is_kda = "kda" in s.shape.mixers
    heads = sizes.num_value_heads // s.tp
    pair_heads = heads if is_kda else sizes.num_key_heads // s.tp
    key = sizes.key_head_dim
    value = sizes.value_head_dim
    flops = heads * (16 * key * value + 6 * CHUNK_SIZE * value + 2 * CHUNK_SIZE * key)
    flops += pair_heads * (6 if is_kda else 12) * CHUNK_SIZE * key
    num_chunks = s.seq_length // CHUNK_SIZE
    return ScanCost(
        flops=s.tokens * flops,
        num_bytes=s.tokens * per_token.backward * FP32,
        launches=(555 if is_kda else 155) + 8 * num_chunks,
    )
