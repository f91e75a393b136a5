"""A group forwards its spec and needs a process group to communicate."""

import pytest

from nanotrain.comm.group import Group
from nanotrain.topology.groups import GroupSpec


def test_a_group_has_the_ranks_of_its_spec():
    spec = GroupSpec("dp", ranks=(1, 5, 9), index=2)
    group = Group(spec, process_group=object())
    assert (group.name, group.ranks, group.index, group.size, group.rank) == ("dp", (1, 5, 9), 2, 3, 9)
    assert not group.is_first


def test_a_group_of_several_ranks_needs_a_process_group():
    with pytest.raises(AssertionError, match="need a process group"):
        Group(GroupSpec("dp", ranks=(0, 1), index=0))
    assert Group.single_rank("tp", rank=3).rank == 3


def test_a_released_group_keeps_its_spec():
    group = Group(GroupSpec("dp", ranks=(0, 1), index=0), process_group=object())
    group.release()
    assert group.process_group is None and group.size == 2
