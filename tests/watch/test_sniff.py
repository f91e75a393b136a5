"""The test of machines: who meets whom, who is named, and a world of ranks with a slow one."""

import itertools
import re
from dataclasses import replace

import pytest

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.errors import EnvironmentFault
from nanotrain.topology.topology import Topology
from nanotrain.watch import sniff
from nanotrain.watch.sniff import Measurement, Outlier, describe, outliers, require_sound, rounds_of
from tests.harness import parallel_config, ranks


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 8, 16])
def test_all_pairs_meet_once_and_no_rank_twice_in_a_round(num_ranks):
    met = set()
    for peers in rounds_of(num_ranks):
        assert [peers[peer] for peer in peers] == list(range(num_ranks))
        met |= {(rank, peer) for rank, peer in enumerate(peers) if rank < peer}
    assert met == set(itertools.combinations(range(num_ranks), 2))


def test_a_large_world_has_few_rounds():
    rounds = rounds_of(1000)
    assert 10 < len(rounds) <= sniff.MAX_ROUNDS
    for peers in rounds:
        assert sorted(peers) == list(range(1000)) and all(rank != peers[rank] for rank in peers)


def products(**seconds: float) -> list[Measurement]:
    """Products of ranks r0, r1, ... of which two are on a host."""
    return [
        Measurement("product", value, int(name[1:]), f"node{int(name[1:]) // 2}")
        for name, value in seconds.items()
    ]


def pairs(slow: set[tuple[int, int]], *, num_ranks: int = 6) -> list[Measurement]:
    """All pairs of ranks, each on a host of its own; some take 50 ms, the others 10."""
    measured = []
    for rank, peer in itertools.combinations(range(num_ranks), 2):
        seconds = 0.050 if (rank, peer) in slow else 0.010
        pair = Measurement("pair", seconds, rank, f"node{rank}", num_bytes=64)
        measured.append(replace(pair, peer=peer, peer_host=f"node{peer}"))
    return measured


def test_a_slow_rank_is_named_and_a_host_of_slow_ranks():
    even = dict.fromkeys(("r0", "r1", "r2", "r3"), 0.010)
    assert outliers(products(**even, r4=0.011, r5=0.014)) == []
    (rank,) = outliers(products(**even, r4=0.010, r5=0.030))
    assert rank.text == "rank 5 on host node2: product takes 30.0 ms, 3.0 times the median 10.0 ms"
    (host,) = outliers(products(**even, r4=0.030, r5=0.040))
    assert host == Outlier("host node2 (all its ranks)", "product", 0.035, 0.010)
    assert outliers(products(**even, r4=0.030, r5=0.040), factor=5.0) == []


def test_of_two_hosts_the_slower_one_is_named():
    (host,) = outliers(products(r0=0.010, r1=0.011, r2=0.030, r3=0.040))
    assert host == Outlier("host node1 (all its ranks)", "product", 0.035, 0.011)
    disks = [
        Measurement("disk", seconds, rank, f"node{rank}") for rank, seconds in enumerate((1, 4))
    ]
    (disk,) = outliers(disks)
    assert (
        disk.text == "rank 1 on host node1: disk takes 4,000.0 ms, 4.0 times the median 1,000.0 ms"
    )


def test_differences_that_are_noise_are_no_outliers():
    assert outliers(products(r0=0.001, r1=0.001, r2=0.001, r3=0.005)) == []


def test_a_slow_link_is_a_pair_and_a_slow_adapter_a_rank():
    (pair,) = outliers(pairs({(1, 4)}))
    assert pair.name == "ranks 1 and 4 on hosts node1 and node4"
    (rank,) = outliers(pairs({(0, 2), (1, 2), (2, 3), (2, 5)}))
    assert rank.name == "rank 2 on host node2"
    assert "across hosts, in 4 of its 5 pairs, takes 50.0 ms, 5.0 times" in rank.text


def test_a_rank_with_as_many_fast_pairs_is_not_named_for_its_slow_ones():
    found = outliers(pairs({(0, 1), (0, 2)}, num_ranks=5))
    assert [outlier.name for outlier in found] == [
        "ranks 0 and 1 on hosts node0 and node1",
        "ranks 0 and 2 on hosts node0 and node2",
    ]


def test_pairs_of_a_host_are_compared_with_each_other():
    inside = [
        replace(pair, seconds=0.001, peer_host=pair.host, rank=pair.rank) for pair in pairs(set())
    ]
    assert outliers([*inside, *pairs(set())]) == []


def test_clocks_are_compared_with_the_median_clock():
    clocks = [Measurement("clock", value, rank, "a") for rank, value in enumerate((0.0, 0.5, 7.0))]
    (clock,) = outliers(clocks)
    assert clock.text == "rank 2 on host a: its clock is off by 7.0 s"


def test_the_text_has_medians_the_slowest_and_outliers():
    measured = [*products(r0=0.010, r1=0.010, r2=0.010, r3=0.030), *pairs(set(), num_ranks=3)]
    found = outliers(measured)
    lines = describe(measured, found).splitlines()
    assert lines[0] == "4 ranks on 2 hosts"
    assert lines[2].split() == ["product", "10.00", "ms", "30.00", "ms", "rank", "3"]
    assert lines[3].startswith("send and receive 64 bytes across hosts")
    assert lines[-1] == f"outlier: {found[0].text}"
    assert describe(measured, []).endswith("\nno outlier")


@ranks(4, threads=False)
def test_a_world_of_ranks_is_measured_and_its_slow_rank_is_named_on_all(ctx, tmp_path):
    # Given a rank that takes a second more for a product,
    fast = sniff.product_s
    delay_s = 1.0 if ctx.rank == 2 else 0.0
    sniff.product_s = lambda device: fast(device) + delay_s
    try:
        # when the world is measured,
        measured = sniff.measure(ctx, tmp_path)
        with pytest.raises(EnvironmentFault) as error:
            require_sound(ctx, tmp_path, factor=50.0)
    finally:
        sniff.product_s = fast
    # then all ranks know all measurements,
    assert all(other == measured for other in all_gather_object(measured, ctx.control))
    kinds = [(item.kind, item.num_bytes) for item in measured]
    for size in sniff.SIZES:
        assert kinds.count(("pair", size)) == 6, "all pairs of four ranks"
        assert kinds.count(("all_reduce", size)) == kinds.count(("all_to_all", size)) == 4
    assert kinds.count(("disk", sniff.DISK_BYTES)) == 1 and kinds.count(("clock", 0)) == 4
    assert all(item.seconds > 0 for item in measured if item.kind != "clock")
    assert not list(tmp_path.iterdir())
    # and every rank raises an error that names the slow one.
    assert re.search(r"rank 2 on host \S+: product takes [\d,.]+ ms", error.value.why)
    assert len(set(all_gather_object(str(error.value), ctx.control))) == 1


def test_one_rank_has_no_peer_and_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    context = ParallelContext.attach(Topology.of(parallel_config(), 1))
    measured = sniff.measure(context, tmp_path)
    assert [item.kind for item in measured] == ["product", "disk", "clock"]
    assert outliers(measured) == []
    assert require_sound(context, tmp_path, factor=2.0).startswith(
        "preflight: no outlier among 1 rank"
    )
    with pytest.raises(EnvironmentFault, match="none is no folder"):
        sniff.measure(context, tmp_path / "none")
