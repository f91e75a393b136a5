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

LAUNCH_S = 6e-6  # latency of a collective across nodes before its first step
MESSAGE_S = 1.5e-6  # latency of every further peer of an all-to-all across nodes
TREE_BANDWIDTH = 0.92  # bandwidth of a tree relative to a ring, as NCCL assumes


class Protocol(NamedTuple):
    """A protocol of NCCL, relative to Simple."""

    latency: float
    bandwidth: float


PROTOCOLS = (Protocol(1.0, 1.0), Protocol(0.5, 0.92), Protocol(0.2, 0.4))  # Simple, LL128, LL


class Algorithm(NamedTuple):
    """An algorithm of a collective across nodes."""

    steps_s: float  # latency of all steps of one round
    bandwidth: float  # relative to a ring


class Placement(NamedTuple):
    """Placement of the ranks of a group on nodes."""

    size: int  # ranks
    num_nodes: int  # nodes that hold them
    per_node: int  # most ranks in one node


@lru_cache(maxsize=1 << 16)
def collective_s(gpu: GPU, operation: str, *, num_bytes: float, ranks: Sequence[int]) -> float:
    """Seconds of a collective.

    Args:
        gpu: the GPU of every rank.
        operation: all_reduce, all_gather, reduce_scatter, all_to_all or p2p.
        num_bytes: size, as in the table above.
        ranks: members in ascending order, a range or a tuple.
    """
    if len(ranks) < 2 or num_bytes <= 0:
        return 0.0
    group = placement(gpu, ranks)
    if group.num_nodes == 1:
        return _inside_s(gpu, operation, num_bytes=num_bytes, size=group.size)
    if operation == "p2p":
        bandwidth = gpu.network.bandwidth * gpu.network_efficiency
        return LAUNCH_S + gpu.network.latency + num_bytes / bandwidth
    if operation == "all_to_all":
        return _all_to_all_s(gpu, num_bytes=num_bytes, group=group)
    return _rounds_s(gpu, operation, num_bytes=num_bytes, group=group)


@lru_cache(maxsize=1 << 12)
def placement(gpu: GPU, ranks: Sequence[int]) -> Placement:
    """The spread of ranks if the scheduler fills one node after the other.

    >>> from nanotrain.planner.hardware import gpu_of
    >>> placement(gpu_of("h100"), range(0, 64, 4))
    Placement(size=16, num_nodes=8, per_node=2)
    """
    counts = Counter(rank // gpu.gpus_per_node for rank in ranks)
    return Placement(len(ranks), len(counts), max(counts.values()))


def _rounds_s(gpu: GPU, operation: str, *, num_bytes: float, group: Placement) -> float:
    """An all-reduce, all-gather or reduce-scatter across nodes, by the fastest algorithm."""
    bandwidth = min(
        group.per_node * gpu.network.bandwidth * gpu.network_efficiency,
        _inside_bandwidth(gpu, group.per_node),
    )
    rounds = 2 if operation == "all_reduce" else 1
    wire_s = rounds * num_bytes * (group.size - 1) / group.size / bandwidth
    times = []
    for algorithm in _algorithms(gpu, operation, group=group):
        for protocol in PROTOCOLS:
            steps_s = rounds * algorithm.steps_s * protocol.latency
            times.append(steps_s + wire_s / (algorithm.bandwidth * protocol.bandwidth))
    return LAUNCH_S + min(times)


def _algorithms(gpu: GPU, operation: str, *, group: Placement) -> list[Algorithm]:
    """The algorithms that may run a collective: a ring, and for an all-reduce also a tree."""
    ring_inside_s = (group.size - group.num_nodes) * gpu.node.latency
    ring_between_s = (group.num_nodes - 1) * gpu.network.latency
    ring = Algorithm(ring_inside_s + ring_between_s, 1.0)
    if operation != "all_reduce":
        return [ring]
    tree_inside_s = (group.per_node - 1) * gpu.node.latency
    tree_between_s = log2(group.num_nodes) * gpu.network.latency
    return [ring, Algorithm(tree_inside_s + tree_between_s, TREE_BANDWIDTH)]


def _all_to_all_s(gpu: GPU, *, num_bytes: float, group: Placement) -> float:
    """Messages to other nodes pass the rank's own adapter, the others NVLink, at the same time."""
    num_outside = group.size - group.per_node
    bandwidth = gpu.network.bandwidth * gpu.network_efficiency
    outside_s = num_bytes * num_outside / group.size / bandwidth
    inside_s = 0.0
    if group.per_node > 1:
        inside_bytes = num_bytes * group.per_node / group.size
        inside_s = _inside_s(gpu, "all_to_all", num_bytes=inside_bytes, size=group.per_node)
    messages_s = num_outside * MESSAGE_S
    return LAUNCH_S + gpu.network.latency + messages_s + max(outside_s, inside_s)


def _inside_s(gpu: GPU, operation: str, *, num_bytes: float, size: int) -> float:
    """A collective inside a node, from the measured times for 2, 4 and 8 GPUs."""
    if operation == "p2p":
        # half of the bytes of each of two ranks of an all-to-all stay where they are
        return _inside_s(gpu, "all_to_all", num_bytes=2 * num_bytes, size=2)
    measured = tables()["collectives"][gpu.collectives][operation]
    scale = gpus()[gpu.collectives].node.bandwidth / gpu.node.bandwidth
    if gpu.is_mesh:  # two of eight GPUs have one link of seven
        scale *= (gpu.gpus_per_node - 1) / (min(size, gpu.gpus_per_node) - 1)
    sizes = sorted(int(ranks) for ranks in measured)
    near = next((ranks for ranks in sizes if ranks >= size), sizes[-1])
    seconds = _measured_s(measured[str(near)], num_bytes * scale)
    latency_s = _measured_s(measured[str(near)], 1.0)
    more_latency_s = 0.0
    if near > 2:
        doubling_s = latency_s - _measured_s(measured[str(near // 2)], 1.0)
        more_latency_s = log2(size / near) * doubling_s
    wire_s = (seconds - latency_s) * ((size - 1) / size) / ((near - 1) / near)
    return latency_s + more_latency_s + wire_s


def _measured_s(times: Sequence[int], num_bytes: float) -> float:
    """Interpolated time; beyond the largest size at the bandwidth between the last two."""
    sizes = tables()["grid"]["bytes"]
    largest = exp(sizes[-1])
    if num_bytes <= largest:
        logs = [100 * log(time) for time in times]
        return 1e-7 * interpolate(logs, (sizes,), point=(num_bytes,))
    before = exp(sizes[-2])
    more = (times[-1] - times[-2]) * (num_bytes - largest) / (largest - before)
    return 1e-7 * (times[-1] + more)


@lru_cache(maxsize=256)
def _inside_bandwidth(gpu: GPU, size: int) -> float:
    """Bytes per second of every rank of a ring inside a node, for large messages."""
    if size == 1:
        return gpu.node.bandwidth
    large = 2.0**29
    return large * (size - 1) / size / _inside_s(gpu, "all_gather", num_bytes=large, size=size)
