"""A group forwards its spec and needs a process group to communicate."""

import pytest

from nanotrain.comm.group import Group, TrafficCounter, reduced_bytes
from nanotrain.topology.groups import GroupSpec


@pytest.fixture(autouse=True)
def any_backend(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_backend", lambda process_group: "threads")


def test_a_group_has_the_ranks_of_its_spec():
    spec = GroupSpec("dp", ranks=(1, 5, 9), index=2)
    group = Group(spec, process_group=object())
    assert (group.name, group.ranks, group.index, group.size, group.rank) == (
        "dp",
        (1, 5, 9),
        2,
        3,
        9,
    )
    assert not group.is_first


def test_a_group_of_several_ranks_needs_a_process_group():
    with pytest.raises(AssertionError, match="need a process group"):
        Group(GroupSpec("dp", ranks=(0, 1), index=0))
    assert Group.single_rank("tp", rank=3).rank == 3


def test_a_released_group_keeps_its_spec():
    group = Group(GroupSpec("dp", ranks=(0, 1), index=0), process_group=object())
    group.release()
    assert group.process_group is None and group.size == 2


def test_bytes_and_calls_add_up_by_group_and_operation():
    traffic = TrafficCounter()
    traffic.record("dp", "reduce_scatter", num_bytes=10)
    traffic.record("dp", "reduce_scatter", num_bytes=10)
    traffic.record("dp", "all_gather", num_bytes=5)
    traffic.record("tp", "all_gather", num_bytes=1)
    assert traffic.bytes("dp", "reduce_scatter") == 20
    assert traffic.calls("dp", "reduce_scatter") == 2
    assert traffic.bytes("dp") == 25
    assert traffic.bytes(op="all_gather") == 6
    assert traffic.bytes() == 26
    assert traffic.bytes("pp") == 0


def test_reset_sets_all_counts_to_zero():
    traffic = TrafficCounter()
    traffic.record("dp", "all_gather", num_bytes=5)
    traffic.reset()
    assert traffic.bytes() == traffic.calls() == 0


def test_a_group_of_one_sends_nothing():
    assert reduced_bytes(1000, 1) == 0
