"""Mamba-2, the pure half of model/mamba.py."""

from collections.abc import Collection
from dataclasses import replace

from nanotrain.spec.declaration import (
    FP32,
    ContextRank,
    Declaration,
    RankSizes,
    Specs,
    grouped,
    nest,
)
from nanotrain.spec.kinds.delta_net import DECAY_RATES, STEPS
from nanotrain.spec.params import ParamSpec, Shard, Uniform
from nanotrain.spec.shape import ModelShape

CHUNK_SIZE = 64  # tokens of a chunk of the scan
CONVOLVED = ("value", "key", "query")


def declare(declare: Declaration) -> Specs:
    """Gate, values, keys, queries and steps of the heads, convolutions, and a norm; all sharded by
    heads or groups.
    """
    shape, mamba = declare.shape, declare.shape.mamba
    heads, hidden = shape.mamba_heads, shape.hidden_size

    def of_heads(name: str, size: int, *, init: Uniform | None = None) -> ParamSpec:
        spec = declare.vector(name, size, value=1.0)
        return replace(spec, init=init or spec.init, shards=(Shard(0, "tp"),))

    widths = inner_widths(shape)
    projections = {"gate": widths["value"], **widths}
    specs: Specs = (
        of_heads("step_bias", heads, init=STEPS),
        of_heads("decay", heads, init=DECAY_RATES),
        of_heads("skip", heads),
        *grouped("norms", [of_heads("norm", widths["value"])] if mamba.rms_norm else []),
    )
    for name, width in projections.items():
        specs += nest(name, declare.column_linear(width, hidden))
    specs += nest("step", declare.narrow_linear(heads))
    for name in CONVOLVED:
        specs += nest(
            f"{name}_conv", declare.convolution(widths[name], mamba.conv_kernel_dim, bias=True)
        )
    return specs + nest("output", declare.row_linear(hidden, widths["value"]))


def inner_widths(shape: ModelShape) -> dict[str, int]:
    """Channels of values, keys and queries, over tp."""
    of_groups = shape.mamba.num_groups * shape.mamba.state_dim
    return {"value": shape.mamba_heads * shape.mamba.head_dim, "key": of_groups, "query": of_groups}


def saved_bytes(rank: RankSizes, layer: int, *, modules: Collection[str]) -> int:
    """Inputs of convolutions, activations and scan, the normalized output before and after its
    weight, and in fp32 steps and decays, the gate and its activation, the output, and both
    multiplied; over cp the states of all chunks.
    """
    shape, mamba = rank.shape, rank.shape.mamba
    widths = {name: width // rank.tp for name, width in inner_widths(shape).items()}
    inner, value, heads = sum(widths.values()), widths["value"], shape.mamba_heads // rank.tp
    in_fp32 = rank.tokens * (4 * value + 4 * heads + mamba.num_groups // rank.tp)
    # the maps of all chunks, and the states between them
    if rank.cp_comm_type not in (None, "a2a"):
        in_fp32 += 4 * rank.cp * rank.batch_size * value * mamba.state_dim
    return rank.tokens * (3 * inner + 2 * value) * rank.itemsize + in_fp32 * FP32


def working_bytes(rank: RankSizes) -> int:
    """Those of the scan, which is computed again, in fp32: pairs of tokens, values, and states of
    the chunks.

    Within 3 % of what torch allocates for 9 pairs of sizes.
    """
    mamba, heads, groups = (
        rank.shape.mamba,
        rank.shape.mamba_heads // rank.tp,
        rank.shape.mamba.num_groups // rank.tp,
    )
    of_head = (
        3 * CHUNK_SIZE + 5 * mamba.head_dim + 3 * mamba.head_dim * mamba.state_dim // CHUNK_SIZE
    )
    return rank.tokens * (heads * of_head + 3 * groups * mamba.state_dim) * FP32


def sequence_flops(shape: ModelShape, layer: int, *, seq_length: int) -> int:
    """The recurrence: two products of a state and a vector per token and head, forward, and twice
    as much backward.
    """
    return 12 * seq_length * inner_widths(shape)["value"] * shape.mamba.state_dim


def cp_bytes(shape: ModelShape, rank: ContextRank) -> dict[str, tuple[int, int]]:
    """The tokens before each chunk for the convolutions, and the states."""
    mamba = shape.mamba
    halo = rank.halo_bytes((mamba.conv_kernel_dim - 1) * sum(inner_widths(shape).values()))
    keys, values = (mamba.num_groups, mamba.state_dim), (shape.mamba_heads, mamba.head_dim)
    return {"p2p": (halo, halo)} | rank.scan_bytes(keys, values, transition=1, output_itemsize=FP32)
