"""Times of one operator on one GPU, from measured kernels.

A roofline at the reachable peak, times a factor of the shape: an interpolated surface of
data/kernels.json, which scripts/kernel_tables.py fits to public measurements. A GPU without
measurements takes the surface of its nearest one.

matmul_s          one product or a batch of them, as linear layers run it
grouped_matmul_s  one product per expert in one launch
attention_s       scaled dot-product attention, forward or backward
memory_s          an operator that only reads and writes
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, lru_cache
from math import exp, log
from typing import Any, NamedTuple

from nanotrain.planner.hardware import DATA, GPU, gpus, read_data

LAUNCH_S = 2e-6  # from the start of a kernel to its first work, and from the last to its end
BYTES: dict[str, float] = read_data("dtypes")["bytes"]
SURFACES: dict[str, list[str]] = read_data("dtypes")["surfaces"]
# Products of weight gradients that add to an fp32 buffer take this much longer than the same
# product into bf16: SimuMax 4dcaae5 configs/system, 144 shapes on a B200 (1.07) and 61 on an A100
# (1.05). Products of input gradients take 1.00.
ACCUMULATE_FACTOR = 1.06
# Backward of attention: five products against two, at a lower share of the peak: SimuMax 4dcaae5
# configs/system (0.83 on B200, 0.85 on A100); FlashAttention-3 (arXiv 2407.08608) Figure 6 (0.85 on
# H100). It splits the keys too, so that few heads fill the GPU as three times as many do forward
# (ibid., 4 to 128 heads).
BACKWARD_FLOPS = 2.5
BACKWARD_EFFICIENCY = 0.85
BACKWARD_HEADS = 3
# Products of experts against plain ones of the same sizes: 1.2 to 1.3 with the best programs for
# B200 and GB200 in the MoE layers of ai-dynamo/aiconfigurator 095f58a5, evenly routed, 128 tokens
# and more per expert.
GROUPED_FACTOR = 1.2
CPU_ATTENTION = 3.0e10  # FLOP/s of a core of the row cpu
STREAMS = 4  # products of experts that run at a time, as in Transformer Engine


class Work(NamedTuple):
    """FLOPs and bytes of a kernel."""

    flops: float
    num_bytes: float


class AttentionShape(NamedTuple):
    """Sizes of one call of causal attention."""

    batch: int
    heads: int
    kv_heads: int
    length: int  # sequence length
    head_dim: int
    value_head_dim: int | None = None  # as head_dim
    window: int | None = None  # keys that a query sees at most, its own included


@lru_cache(maxsize=1 << 16)
def matmul_s(
    gpu: GPU, shape: tuple[int, int, int], *, dtype: str, num: int = 1, accumulate: bool = False
) -> float:
    """Seconds of products of m x k with k x n matrices.

    Args:
        gpu: the device.
        shape: m, n and k; k are the tokens for a weight gradient.
        dtype: dtype of the inputs.
        num: products of the batch.
        accumulate: add to an fp32 output instead of writing bf16.
    """
    m, n, k = shape
    surfaces = tables()["matmul"][gpu.kernels]
    surface = surfaces[next(name for name in SURFACES[dtype] if name in surfaces)]
    axes = tables()["grid"]
    factor = interpolate(
        surface["values"], (axes["m"], axes["n"], axes["n"]), point=(m, n * num, k)
    )
    if accumulate:
        factor *= ACCUMULATE_FACTOR
    peak = gpu.peak(dtype)
    work = matmul_work(shape, dtype=dtype, num=num)
    seconds = factor * roofline_s(gpu, work, flops_per_s=peak * gpu.reachable[dtype])
    work_with_output = matmul_work(shape, dtype=dtype, num=num, accumulate=accumulate)
    return max(seconds, roofline_s(gpu, work_with_output, flops_per_s=peak))


def grouped_matmul_s(
    gpu: GPU,
    shape: tuple[int, int, int],
    *,
    num_experts: int,
    dtype: str,
    accumulate: bool = False,
) -> float:
    """Seconds of one product per expert.

    Args:
        gpu: the device.
        shape: tokens of all experts, n and k; for a weight gradient the tokens are summed over.
        num_experts: experts of the rank.
        dtype: dtype of the inputs.
        accumulate: compute weight gradients, which add to an fp32 output.
    """
    tokens, n, k = shape
    tokens_per_expert = max(tokens // num_experts, 1)
    product = (n, k, tokens_per_expert) if accumulate else (tokens_per_expert, n, k)
    at_once = min(num_experts, STREAMS)
    seconds = matmul_s(gpu, product, dtype=dtype, num=at_once, accumulate=accumulate)
    return LAUNCH_S + GROUPED_FACTOR * num_experts / at_once * (seconds - LAUNCH_S)


@lru_cache(maxsize=1 << 14)
def attention_s(
    gpu: GPU,
    shape: AttentionShape,
    *,
    dtype: str = "bf16",
    backward: bool = False,
    flops_per_s: float | None = None,
) -> float:
    """Seconds of attention, without projections.

    Args:
        gpu: the device.
        shape: sizes of the call.
        dtype: dtype of the inputs.
        backward: the backward instead of the forward.
        flops_per_s: what the forward of a kernel reaches that pads values to the width of keys;
            None for the measured kernel.
    """
    surfaces = tables()["attention"][gpu.kernels]
    surface = surfaces[min(surfaces, key=lambda size: abs(int(size) - shape.head_dim))]
    heads = shape.batch * shape.heads
    if backward:
        heads *= BACKWARD_HEADS
    axes = tables()["grid"]
    factor = interpolate(
        surface["values"], (axes["queries"], axes["heads"]), point=(shape.length, heads)
    )
    reference = gpus()[gpu.kernels]
    if flops_per_s is None:
        share = surface["flops_per_s"] / reference.peak("bf16")
        share = share * gpu.reachable["bf16"] / reference.reachable["bf16"]
    else:
        share = flops_per_s / gpu.peak("bf16")
        shape = shape._replace(value_head_dim=shape.head_dim)
    work = attention_work(shape)
    peak = gpu.peak(dtype)
    seconds = factor * roofline_s(gpu, work, flops_per_s=peak * share)
    if not backward:
        return max(seconds, work.flops / peak)
    # kernels of the backward pass pad the smaller of two head sizes
    value_head_dim = shape.value_head_dim or shape.head_dim
    padded = 2 * max(shape.head_dim, value_head_dim) / (shape.head_dim + value_head_dim)
    return BACKWARD_FLOPS * max(seconds * padded / BACKWARD_EFFICIENCY, work.flops / peak)


def memory_s(gpu: GPU, num_bytes: float) -> float:
    """Seconds of a memory-bound operator that reads and writes `num_bytes`."""
    return LAUNCH_S + num_bytes / (gpu.memory_bandwidth * gpu.memory_efficiency)


def matmul_work(
    shape: Sequence[int], *, dtype: str, num: int = 1, accumulate: bool = False
) -> Work:
    """FLOPs and bytes of a product."""
    m, n, k = shape
    input_bytes = BYTES[dtype] * k * (m + n)
    output_bytes = (8 if accumulate else 2) * m * n
    return Work(num * 2.0 * m * n * k, num * (input_bytes + output_bytes))


def attention_work(shape: AttentionShape) -> Work:
    """FLOPs and bytes of the forward pass."""
    keys = min(shape.window or shape.length, shape.length)
    pairs = keys * (shape.length - (keys - 1) / 2)
    width = shape.head_dim + (shape.value_head_dim or shape.head_dim)
    num_bytes = 2.0 * shape.batch * width * shape.length * (shape.heads + shape.kv_heads)
    return Work(2.0 * shape.batch * shape.heads * pairs * width, num_bytes)


def roofline_s(gpu: GPU, work: Work, *, flops_per_s: float) -> float:
    """Least seconds of a kernel, with its launch."""
    memory_seconds = work.num_bytes / (gpu.memory_bandwidth * gpu.memory_efficiency)
    return LAUNCH_S + max(work.flops / flops_per_s, memory_seconds)


def interpolate(
    values: Sequence[float], axes: Sequence[Sequence[float]], *, point: Sequence[float]
) -> float:
    """The factor at a point of a surface, multilinear in the logarithms of the sizes.

    >>> axes = [[0.0, 1.0], [log(16), log(64)]]
    >>> interpolate([0, 100 * log(2), 0, 100 * log(2)], axes, point=[1, 32])
    1.4142135623730951

    Args:
        values: hundredths of logarithms at the grid's points, the last axis fastest.
        axes: logarithms of the grid's sizes; beyond them the nearest counts.
        point: a size per axis.
    """
    weights = {0: 0.01}  # by the index of a corner of the cell around the point
    for nodes, size in zip(axes, point, strict=True):
        position = min(max(log(size), nodes[0]), nodes[-1])
        low = min(bisect_right(nodes, position) - 1, len(nodes) - 2)
        share = (position - nodes[low]) / (nodes[low + 1] - nodes[low])
        further = {}
        for corner, weight in weights.items():
            index = corner * len(nodes) + low
            further[index] = weight * (1.0 - share)
            further[index + 1] = weight * share
        weights = further
    return exp(sum(values[corner] * weight for corner, weight in weights.items()))


@cache
def tables() -> dict[str, Any]:
    """The tables of measured kernels, with the logarithms of the grid."""
    content: dict[str, Any] = json.loads((DATA / "kernels.json").read_bytes())
    grid = content["grid"]
    num_values = len(grid["m"]) * len(grid["n"]) ** 2
    flat = [0] * num_values  # products of any shape fill a core
    content["matmul"]["cpu"] = {"bf16": {"values": flat}}
    content["attention"]["cpu"] = {"64": {"values": flat, "flops_per_s": CPU_ATTENTION}}
    content["grid"] = {name: list(map(log, sizes)) for name, sizes in grid.items()}
    return content
