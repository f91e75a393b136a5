"""Mamba-2: parameters and operators; the module is model/mamba.py."""

from nanotrain.spec.declaration import Declaration, Specs, grouped, nest
from nanotrain.spec.kinds.convolution import scan_modules, short_convolutions
from nanotrain.spec.kinds.delta_net import DECAY_RATES, STEPS
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import POINTWISE, Gate, Norm, Operators, Saved, Scan
from nanotrain.spec.over_cp import scan_sent
from nanotrain.spec.params import Constant
from nanotrain.spec.scan_cost import (
    Elements,
    PassTerms,
    ScanSizes,
    fused_scan_bytes,
    scan_cost,
)
from nanotrain.spec.scan_kernels import kernel_costs
from nanotrain.spec.shape import ModelShape

CHUNK_SIZE = 64  # tokens of a chunk of the scan
CONVOLVED = ("value", "key", "query")
ONES = Constant(1.0)
FORWARD = PassTerms(
    launches=32,
    launches_per_chunk=2,
    head_elements=Elements(chunk=8, value=18, state=9),
    group_elements=Elements(chunk=5, key=12),
    state_flops=4,
    value_flops=2,
    group_flops=2,
)
BACKWARD = PassTerms(
    launches=82,
    launches_per_chunk=6,
    head_elements=Elements(chunk=22, value=50, state=25),
    group_elements=Elements(chunk=10, key=32),
    state_flops=12,
    value_flops=4,
    group_flops=6,
)


def declare(declare: Declaration) -> Specs:
    """Projections, convolutions, and vectors per head; all sharded by heads or groups."""
    shape = declare.shape
    heads = shape.mamba_heads
    hidden = shape.hidden_size
    widths = inner_widths(shape)
    kernel = shape.mamba.conv_kernel_dim
    step_bias = declare.head_vector("step_bias", heads, init=STEPS)
    decay = declare.head_vector("decay", heads, init=DECAY_RATES)
    skip = declare.head_vector("skip", heads, init=ONES)
    specs: Specs = (step_bias, decay, skip)
    if shape.mamba.rms_norm:
        norm = declare.head_vector("norm", widths["value"], init=ONES)
        specs += grouped("norms", [norm])
    specs += nest("gate", declare.column_linear(widths["value"], hidden))
    for name in CONVOLVED:
        specs += nest(name, declare.column_linear(widths[name], hidden))
    specs += nest("step", declare.narrow_linear(heads))
    for name in CONVOLVED:
        specs += nest(f"{name}_conv", declare.convolution(widths[name], kernel, bias=True))
    return specs + nest("output", declare.row_linear(hidden, widths["value"]))


def inner_widths(shape: ModelShape) -> dict[str, int]:
    """Channels of values, keys and queries, over all tp ranks."""
    groups = shape.mamba.num_groups * shape.mamba.state_dim
    values = shape.mamba_heads * shape.mamba.head_dim
    return {"value": values, "key": groups, "query": groups}


def operators(s: LayerSizes) -> Operators:
    """Projections, convolutions, the scan, and the gated and normalized output."""
    shape = s.shape
    sizes = shape.mamba
    widths = {name: width // s.tp for name, width in inner_widths(shape).items()}
    heads = shape.mamba_heads // s.tp
    value = s.tokens * widths["value"]
    convolved = {f"{name}_conv": width for name, width in widths.items()}
    again = (POINTWISE,)
    # in fp32: the output; the gate and its activation, and their product
    scanned = Saved(value * FP32)
    gated = Saved(3 * value * FP32, dropped_by=again)
    gate = Saved(value * s.itemsize, only_with=POINTWISE)
    statistics = Saved(s.tokens * sizes.num_groups // s.tp * FP32, dropped_by=again)
    normed = Saved(2 * value * s.itemsize, dropped_by=again)  # before and after the weight
    kernel_size = sizes.conv_kernel_dim
    projected = {"gate": widths["value"], **widths, "step": heads}
    operators: Operators = [s.column(projected, saves=(s.layer_input,))]
    # inputs, outputs and activations
    convolution = short_convolutions(
        s, convolved, kernel_size=kernel_size, num_saved=3, num_projected=heads
    )
    operators.append(convolution)
    operators.append(_scan(s))
    saves = (scanned, gated, gate)
    operators.append(Gate(name="output_gate", recomputed_by=again, numel=value, saves=saves))
    norm_saves = (statistics, normed)
    operators.append(Norm(name="mamba_norm", recomputed_by=again, numel=value, saves=norm_saves))
    operators.append(s.row(widths["value"]))
    return operators


def _scan_sizes(s: LayerSizes) -> ScanSizes:
    """Heads and chunks of the scan on one rank."""
    mamba = s.shape.mamba
    return ScanSizes(
        tokens=s.tokens,
        num_chunks=s.seq_length // CHUNK_SIZE,
        chunk=CHUNK_SIZE,
        heads=s.shape.mamba_heads // s.tp,
        groups=mamba.num_groups // s.tp,
        key=mamba.state_dim,
        value=mamba.head_dim,
    )


def _scan(s: LayerSizes) -> Scan:
    """State space duality (attention/ssd.py)."""
    mamba = s.shape.mamba
    sizes = _scan_sizes(s)
    state = mamba.head_dim * mamba.state_dim
    steps = Saved(4 * sizes.heads * s.tokens * FP32, dropped_by=scan_modules(s))  # and decays
    saved = 0
    if s.cp_comm_type not in (None, "a2a"):  # the maps of all chunks, and states
        num_states = 4 * s.cp * s.batch_size * sizes.heads
        saved = num_states * state
    # pairs of tokens, values and states of the chunks: within 3 % of what torch allocates
    per_head = 3 * CHUNK_SIZE + 5 * mamba.head_dim + 3 * state // CHUNK_SIZE
    per_token = sizes.heads * per_head + 3 * sizes.groups * mamba.state_dim
    return Scan(
        name="ssd",
        saves=(steps, Saved(saved * FP32)),
        working=s.tokens * per_token * FP32,
        over_cp=scan_sent(s, sizes, transition=1, output_itemsize=FP32),
        recurrence_flops=4 * s.tokens * sizes.heads * state,
        fused_bytes=fused_scan_bytes(sizes, itemsize=s.itemsize),
        forward=scan_cost(FORWARD, sizes),
        backward=scan_cost(BACKWARD, sizes),
        rule="mamba2",
        kernels=kernel_costs("mamba2", sizes, itemsize=s.itemsize, batch=s.batch_size),
    )
