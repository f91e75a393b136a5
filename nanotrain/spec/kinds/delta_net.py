"""Gated DeltaNet and Kimi Delta Attention (KDA): parameters and operators; the modules are in
model/delta_net.py.

    gated_delta_net, kda    parameters
    operators               operators of both
"""

import math
from collections.abc import Mapping

from nanotrain.config.layer_kinds import LinearAttentionConfig
from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, summed
from nanotrain.spec.kinds.attention import down_projection, up_projection
from nanotrain.spec.kinds.convolution import scan_modules, short_convolutions
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import (
    POINTWISE,
    Gate,
    Norm,
    Operators,
    Saved,
    Scan,
)
from nanotrain.spec.over_cp import scan_sent
from nanotrain.spec.params import Uniform
from nanotrain.spec.scan_cost import (
    Elements,
    PassTerms,
    ScanSizes,
    fused_scan_bytes,
    scan_cost,
)
from nanotrain.spec.scan_kernels import kernel_costs
from nanotrain.spec.shape import ModelShape

CHUNK_SIZE = 64  # tokens of a chunk of the rule
DECAY_RATES = Uniform(1.0, 16.0, "log")  # as in Mamba-2 of Megatron-LM
STEPS = Uniform(math.log(1e-3), math.log(0.1), "inverse_softplus_of_exp")
GDN_FORWARD = PassTerms(
    launches=47,
    launches_per_chunk=4,
    head_elements=Elements(chunk=13, key=10, value=25, state=8),
    group_elements=Elements(key=29),
    state_flops=6,
    value_flops=2,
    group_flops=4,
)
GDN_BACKWARD = PassTerms(
    launches=155,
    launches_per_chunk=8,
    head_elements=Elements(chunk=53, key=39, value=41, state=33),
    group_elements=Elements(chunk=42, key=69),
    state_flops=16,
    value_flops=6,
    key_flops=2,
    group_flops=12,
)
# decays per channel: pairs of tokens are products of blocks, half as long from step to step
KDA_FORWARD = PassTerms(
    launches=161,
    launches_per_chunk=4,
    head_elements=Elements(key=177, value=34),
    state_flops=6,
    value_flops=2,
    key_flops=2,
)
KDA_BACKWARD = PassTerms(
    launches=555,
    launches_per_chunk=8,
    head_elements=Elements(chunk=14, key=765, value=62),
    state_flops=16,
    value_flops=6,
    key_flops=8,
)


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
    """Gate and steps per channel, by one projection each or by two of low rank, whose first halves
    are replicated.
    """
    shape = declare.shape
    sizes = _sizes(shape)
    widths = _widths(shape)
    gates = nest("beta", declare.narrow_linear(sizes.num_value_heads))
    if sizes.full_rank_gates:
        gates += nest("gate", declare.column_linear(widths["value"], shape.hidden_size))
        gates += nest("step", declare.column_linear(widths["key"], shape.hidden_size))
        return _declare(declare, gates, num_steps=widths["key"])
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
    decay = declare.head_vector("decay", sizes.num_value_heads, init=DECAY_RATES)
    step_bias = declare.head_vector("step_bias", num_steps, init=STEPS)
    specs: Specs = (decay, step_bias)
    head_dims = {
        "query": sizes.key_head_dim,
        "key": sizes.key_head_dim,
        "value": sizes.value_head_dim,
    }
    for name, width in widths.items():
        projection = declare.column_linear(width, hidden, head_rows=(head_dims[name],))
        specs += nest(name, projection)
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
    values = sizes.num_value_heads * sizes.value_head_dim
    return {"query": keys, "key": keys, "value": values}


def _local_widths(s: LayerSizes) -> dict[str, int]:
    """Channels of the heads of the tp rank."""
    return {name: width // s.tp for name, width in _widths(s.shape).items()}


def gated_delta_net_operators(s: LayerSizes) -> Operators:
    """Gated DeltaNet: one product for all projections."""
    widths = _local_widths(s)
    heads = _sizes(s.shape).num_value_heads // s.tp
    value = s.tokens * widths["value"]
    projected = {**widths, "gate": widths["value"], "step": heads, "beta": heads}
    gate = Saved(value * s.itemsize)
    operators: Operators = [s.column(projected, saves=(s.layer_input,))]
    operators += _rule_operators(s, widths, num_steps=heads)
    operators.append(_output_gate(s, value, gate=gate))
    operators.append(s.row(widths["value"]))
    return operators


def kda_operators(s: LayerSizes) -> Operators:
    """The operators of KDA; of low-rank gates and steps, every tp rank computes the first half."""
    sizes = _sizes(s.shape)
    widths = _local_widths(s)
    projected = widths | {"beta": sizes.num_value_heads // s.tp}
    value = s.tokens * widths["value"]
    gate = Saved(value * s.itemsize, only_with=POINTWISE)
    if sizes.full_rank_gates:
        projected |= {"gate": widths["value"], "step": widths["key"]}
    operators: Operators = [s.column(projected, saves=(s.layer_input,))]
    if not sizes.full_rank_gates:
        operators += _low_rank_gates(s, widths)
    operators += _rule_operators(s, widths, num_steps=widths["key"])
    operators.append(_output_gate(s, value, gate=gate))
    operators.append(s.row(widths["value"]))
    return operators


def _low_rank_gates(s: LayerSizes, widths: Mapping[str, int]) -> Operators:
    """Both projections of the gate, and both of the steps."""
    sizes = _sizes(s.shape)
    key_dim = sizes.key_head_dim
    value_dim = sizes.value_head_dim
    return [
        down_projection(s, "gate_down", outputs=value_dim),
        down_projection(s, "step_down", outputs=key_dim),
        up_projection(s, "gate_up", outputs=widths["value"], inputs=value_dim),
        up_projection(s, "step_up", outputs=widths["key"], inputs=key_dim),
    ]


def _output_gate(s: LayerSizes, numel: int, *, gate: Saved) -> Gate:
    """The product of the normalized outputs with the activation of a gate, which keeps both."""
    gated = Saved(2 * numel * s.itemsize, dropped_by=(POINTWISE,))
    return Gate(name="output_gate", recomputed_by=(POINTWISE,), numel=numel, saves=(gated, gate))


def _rule_operators(s: LayerSizes, widths: Mapping[str, int], *, num_steps: int) -> Operators:
    """Convolutions, the delta rule and the norm of its outputs.

    Args:
        s: sizes of the layer.
        widths: local channels of queries, keys and values.
        num_steps: steps of the decay per token.
    """
    convolved = {f"{name}_conv": width for name, width in widths.items()}
    kernel_size = _sizes(s.shape).conv_kernel_dim
    outputs = s.tokens * widths["value"]
    # inputs, outputs and activations
    num_heads = _sizes(s.shape).num_value_heads // s.tp
    convolutions = short_convolutions(
        s, convolved, kernel_size=kernel_size, num_saved=3, num_projected=num_steps + num_heads
    )
    again = (POINTWISE,)
    scanned = Saved(outputs * s.itemsize)
    normed = Saved(outputs * s.itemsize, dropped_by=again)
    statistics = Saved(outputs // _sizes(s.shape).value_head_dim * FP32, dropped_by=again)
    saves = (scanned, normed, statistics)
    norm = Norm(name="linear_norm", recomputed_by=again, numel=outputs, saves=saves)
    return [convolutions, _scan(s, num_steps=num_steps), norm]


def _scan_sizes(s: LayerSizes) -> ScanSizes:
    """Heads and chunks of the rule on one rank."""
    config = _sizes(s.shape)
    return ScanSizes(
        tokens=s.tokens,
        num_chunks=s.seq_length // CHUNK_SIZE,
        chunk=CHUNK_SIZE,
        heads=config.num_value_heads // s.tp,
        groups=config.num_key_heads // s.tp,
        key=config.key_head_dim,
        value=config.value_head_dim,
    )


def _scan(s: LayerSizes, *, num_steps: int) -> Scan:
    """The gated delta rule (attention/delta_rule.py)."""
    sizes = _scan_sizes(s)
    rule = "gated_delta_net"
    if "kda" in s.shape.mixers:
        rule = "kda"
        num_decays = sizes.key
        per_token = _channel_temporaries(sizes)
        forward = scan_cost(KDA_FORWARD, sizes)
        backward = scan_cost(KDA_BACKWARD, sizes)
    else:
        num_decays = 1
        per_token = _head_temporaries(sizes)
        forward = scan_cost(GDN_FORWARD, sizes)
        backward = scan_cost(GDN_BACKWARD, sizes)
    num_saved = s.tokens * (3 * num_steps + 2 * sizes.heads)
    steps = Saved(num_saved * FP32, dropped_by=scan_modules(s))  # and decays and corrections
    saved = 0
    if s.cp_comm_type not in (None, "a2a"):  # maps of all chunks
        width = sizes.key * (sizes.key + sizes.value)
        num_maps = 2 * s.cp * s.batch_size * sizes.heads
        saved = num_maps * width
    token_flops = 6 * sizes.heads * sizes.key * sizes.value
    return Scan(
        name="delta_rule",
        saves=(steps, Saved(saved * FP32)),
        working=s.tokens * per_token * FP32,
        over_cp=scan_sent(s, sizes, transition=sizes.key**2, num_decays=num_decays),
        recurrence_flops=s.tokens * token_flops,
        fused_bytes=fused_scan_bytes(sizes, itemsize=s.itemsize),
        forward=forward,
        backward=backward,
        rule=rule,
        kernels=kernel_costs(rule, sizes, itemsize=s.itemsize, batch=s.batch_size),
    )


def _head_temporaries(sizes: ScanSizes) -> int:
    """Elements in fp32 per token in the backward: within 5 % of torch for 27 pairs of sizes."""
    value_and_state = sizes.value + sizes.state
    per_head = 6 * CHUNK_SIZE + 3 * sizes.key + 9 * value_and_state // 2
    return sizes.heads * per_head + sizes.groups * 6 * sizes.key


def _channel_temporaries(sizes: ScanSizes) -> int:
    """Elements in fp32 per token in the backward, with decays per channel of a key."""
    return sizes.heads * (3 * CHUNK_SIZE + 37 * sizes.key + 7 * sizes.value)
