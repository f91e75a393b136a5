"""Time of a collective of one group, while no other communication runs.

Inside a node, times are those measured with NCCL (data/kernels.json), scaled to the GPU's link.
Across nodes they are latency plus bytes over bandwidth, by the fastest algorithm (a ring, or for
all-reduce a tree) and protocol. Every GPU has an adapter of its own, so a group with g ranks per
node has g of them in each.

    all_reduce      num_bytes: the tensor of a rank
    all_gather      the gathered tensor
    reduce_scatter  the tensor before it
    all_to_all      what a rank sends in all, its own part included
    p2p             the message

NCCL chooses by the same kind of estimate (src/graph/tuning.cc: steps inside and between nodes, each
with a latency).
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import exp, log, log2
from typing import NamedTuple

from nanotrain.planner.hardware import GPU, gpus
from nanotrain.planner.kernels import interpolate, tables

LAUNCH_S = 6e-6  # of a collective across nodes, before its first step
MESSAGE_S = 1.5e-6  # of every further peer of an all-to-all across nodes
TREE_BANDWIDTH = 0.92  # of a tree relative to a ring, as NCCL assumes
# latency and bandwidth of NCCL's protocols Simple, LL128 and LL, relative to Simple
PROTOCOLS = ((1.0, 1.0), (0.5, 0.92), (0.2, 0.4))


class Placement(NamedTuple):
    """Where the ranks of a group lie."""

    size: int  # ranks
    num_nodes: int  # nodes that hold them
    per_node: int  # most ranks in one node


@lru_cache(maxsize=1 << 16)
def collective_s(gpu: GPU, operation: str, *, num_bytes: float, ranks: Sequence[int]) -> float:
    """Seconds of a collective.

    Args:
        gpu: the GPU of every rank.
        operation: all_reduce, all_gather, reduce_scatter, all_to_all or p2p.
        num_bytes: size, as the table above has it.
        ranks: members in ascending order, a range or a tuple.
    """
    if len(ranks) < 2 or num_bytes <= 0:
        return 0.0
    place, link = placement(gpu, ranks), gpu.network
    if place.num_nodes == 1:
        return _inside_s(gpu, operation, num_bytes=num_bytes, size=place.size)
    if operation == "p2p":
        return LAUNCH_S + link.latency + num_bytes / (link.bandwidth * gpu.network_efficiency)
    if operation == "all_to_all":
        return _all_to_all_s(gpu, num_bytes=num_bytes, place=place)
    bandwidth = min(
        place.per_node * link.bandwidth * gpu.network_efficiency,
        _inside_bandwidth(gpu, place.per_node),
    )
    rounds = 2 if operation == "all_reduce" else 1
    wire_s = rounds * num_bytes * (place.size - 1) / place.size / bandwidth
    steps_s = (place.size - place.num_nodes) * gpu.node.latency + (
        place.num_nodes - 1
    ) * link.latency
    algorithms = [(steps_s, 1.0)]
    if operation == "all_reduce":
        depth_s = (place.per_node - 1) * gpu.node.latency + log2(place.num_nodes) * link.latency
        algorithms.append((depth_s, TREE_BANDWIDTH))
    return LAUNCH_S + min(
        rounds * steps * latency + wire_s / (share * speed)
        for steps, share in algorithms
        for latency, speed in PROTOCOLS
    )


@lru_cache(maxsize=1 << 12)
def placement(gpu: GPU, ranks: Sequence[int]) -> Placement:
    """Where ranks lie when the scheduler fills one node after the other.

    >>> from nanotrain.planner.hardware import gpu_of
    >>> placement(gpu_of("h100"), range(0, 64, 4))
    Placement(size=16, num_nodes=8, per_node=2)
    """
    counts = Counter(rank // gpu.gpus_per_node for rank in ranks)
    return Placement(len(ranks), len(counts), max(counts.values()))


def _all_to_all_s(gpu: GPU, *, num_bytes: float, place: Placement) -> float:
    """Messages to other nodes pass the rank's own adapter, the others NVLink, at the same time."""
    outside = place.size - place.per_node
    across = num_bytes * outside / place.size / (gpu.network.bandwidth * gpu.network_efficiency)
    share = num_bytes * place.per_node / place.size
    inside = (
        _inside_s(gpu, "all_to_all", num_bytes=share, size=place.per_node)
        if place.per_node > 1
        else 0.0
    )
    return LAUNCH_S + gpu.network.latency + outside * MESSAGE_S + max(across, inside)


def _inside_s(gpu: GPU, operation: str, *, num_bytes: float, size: int) -> float:
    """A collective inside a node, from the measured times for 2, 4 and 8 GPUs."""
    # half of what each of two ranks of an all-to-all sends stays where it is
    if operation == "p2p":
        operation, num_bytes, size = "all_to_all", 2 * num_bytes, 2
    reference, measured = (
        gpus()[gpu.collectives],
        tables()["collectives"][gpu.collectives][operation],
    )
    scale = reference.node.bandwidth / gpu.node.bandwidth
    if gpu.is_mesh:  # two of eight GPUs have one link of seven
        scale *= (gpu.gpus_per_node - 1) / (min(size, gpu.gpus_per_node) - 1)
    sizes = sorted(int(ranks) for ranks in measured)
    near = next((ranks for ranks in sizes if ranks >= size), sizes[-1])
    seconds, least = (_measured_s(measured[str(near)], each) for each in (num_bytes * scale, 1.0))
    more_latency = (
        log2(size / near) * (least - _measured_s(measured[str(near // 2)], 1.0))
        if near > 2
        else 0.0
    )
    wire = (seconds - least) * ((size - 1) / size) / ((near - 1) / near)
    return least + more_latency + wire


def _measured_s(times: Sequence[int], num_bytes: float) -> float:
    """Interpolated time; beyond the largest size at the bandwidth between the last two."""
    nodes = tables()["grid"]["bytes"]
    largest = exp(nodes[-1])
    if num_bytes > largest:
        before = exp(nodes[-2])
        return 1e-7 * (
            times[-1] + (times[-1] - times[-2]) * (num_bytes - largest) / (largest - before)
        )
    return 1e-7 * interpolate([100 * log(time) for time in times], (nodes,), point=(num_bytes,))


@lru_cache(maxsize=256)
def _inside_bandwidth(gpu: GPU, size: int) -> float:
    """Bytes per second of every rank of a ring inside a node, for large messages."""
    if size == 1:
        return gpu.node.bandwidth
    large = 2.0**29
    return large * (size - 1) / size / _inside_s(gpu, "all_gather", num_bytes=large, size=size)
