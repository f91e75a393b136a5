"""Times of collectives: by size of the group, its place and the bandwidth of the links."""

from dataclasses import replace

import pytest

from nanotrain.planner.collectives import (
    LAUNCH_S,
    PROTOCOLS,
    Placement,
    collective_s,
    placement,
)
from nanotrain.planner.hardware import Link, gpu_of, gpus

OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]
MIB = 2**20


def test_a_group_of_one_sends_nothing() -> None:
    assert collective_s(gpu_of("h100"), "all_reduce", num_bytes=MIB, ranks=(3,)) == 0


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", sorted(gpus()))
def test_more_bytes_take_longer(operation: str, name: str) -> None:
    for ranks in (range(2), range(0, 16, 8), range(256)):
        members, gpu = (ranks[:2] if operation == "p2p" else ranks), gpu_of(name)
        sizes = [MIB << power for power in range(0, 14, 2)]
        times = [collective_s(gpu, operation, num_bytes=size, ranks=members) for size in sizes]
        assert times == sorted(times)
        assert times[0] > 0


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("level", "ranks"), [("node", range(2)), ("network", (0, 9))])
def test_a_faster_link_is_faster(operation: str, level: str, ranks: range) -> None:
    gpu = gpu_of("h100")
    link = getattr(gpu, level)
    faster = replace(gpu, **{level: Link(2 * link.bandwidth, link.latency)})
    times = [collective_s(one, operation, num_bytes=64 * MIB, ranks=ranks) for one in (gpu, faster)]
    assert times[1] < 0.7 * times[0]


def test_places_of_groups() -> None:
    h100 = gpu_of("h100")
    assert placement(h100, range(8)) == Placement(8, 1, 8)
    assert placement(h100, range(3, 64, 8)) == Placement(8, 8, 1)
    assert placement(h100, (0, 1, 8, 9)) == Placement(4, 2, 2)
    assert placement(h100, (0, 1, 2, 8)) == Placement(4, 2, 3), "the most in one node"
    assert placement(h100, (0, 9, 10, 11)) == Placement(4, 2, 3)
    assert placement(gpu_of("gb200"), range(64)).num_nodes == 1


def test_measured_bandwidth_inside_a_node_is_met() -> None:
    """nccl-tests of 8 H100, aiconfigurator 095f58a5: an all-reduce of 512 MiB at 430 GB/s of bus
    bandwidth.
    """
    seconds = collective_s(gpu_of("h100"), "all_reduce", num_bytes=512 * MIB, ranks=range(8))
    assert 2 * 7 / 8 * 512 * MIB / seconds == pytest.approx(470e9, rel=0.1)


def test_measured_bandwidth_across_nodes_is_met() -> None:
    """32 B200 on 4 nodes with 400 Gb/s of EFA each, stas00/ml-engineering network/README.md: 377
    GB/s.
    """
    seconds = collective_s(gpu_of("b200"), "all_reduce", num_bytes=4096 * MIB, ranks=range(32))
    assert 2 * 31 / 32 * 4096 * MIB / seconds == pytest.approx(377e9, rel=0.15)


def test_ranks_of_a_node_share_the_adapters() -> None:
    gpu, size = gpu_of("h100"), 256 * MIB
    spread = collective_s(gpu, "all_gather", num_bytes=size, ranks=range(0, 64, 8))
    packed = collective_s(gpu, "all_gather", num_bytes=size, ranks=(0, 1, 2, 3, 8, 9, 10, 11))
    assert packed < spread / 3


def test_a_mesh_of_two_has_one_link() -> None:
    gpu, size = gpu_of("mi300x"), 512 * MIB
    two, eight = (collective_s(gpu, "all_gather", num_bytes=size, ranks=range(n)) for n in (2, 8))
    assert two > 2 * eight


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("level", ["node", "network"])
def test_across_nodes_the_slowest_link_bounds_the_time(operation: str, level: str) -> None:
    gpu, size = gpu_of("h100"), 256 * MIB
    link = getattr(gpu, level)
    slow = replace(gpu, **{level: Link(link.bandwidth / 1000, link.latency)})
    ranks = range(16)
    seconds, slowed = (
        collective_s(one, operation, num_bytes=size, ranks=ranks) for one in (gpu, slow)
    )
    # of every operation half of the bytes at least pass this link; an adapter sends for its rank
    share = 0.5 * (8 if level == "network" and operation != "all_to_all" else 1) ** -1
    assert slowed > share * size / (link.bandwidth / 1000)
    assert slowed > 50 * seconds


def test_small_messages_between_many_nodes_take_a_tree_and_large_ones_the_bandwidth_of_a_ring() -> (
    None
):
    gpu = gpu_of("h100")
    # one rank per node: a tree has log2(64) levels up and down, a ring 63 steps each way
    ranks = range(0, 64 * gpu.gpus_per_node, gpu.gpus_per_node)
    tree_s = LAUNCH_S + 2 * 6 * gpu.network.latency * PROTOCOLS[-1].latency
    ring_s = LAUNCH_S + 63 * gpu.network.latency * PROTOCOLS[-1].latency
    one = {
        operation: collective_s(gpu, operation, num_bytes=1, ranks=ranks)
        for operation in ("all_reduce", "all_gather", "reduce_scatter")
    }
    assert one["all_reduce"] == pytest.approx(tree_s, rel=1e-3)
    assert one["all_gather"] == one["reduce_scatter"] == pytest.approx(ring_s, rel=1e-3)
    large = 1 << 40
    seconds = collective_s(gpu, "all_reduce", num_bytes=large, ranks=ranks)
    bandwidth = gpu.network.bandwidth * gpu.network_efficiency
    assert seconds == pytest.approx(2 * large * 63 / 64 / bandwidth, rel=1e-3)
