"""A group knows its neighbours and refuses to be one it cannot serve."""

import pytest

from nanotrain.comm.group import Group


def test_neighbours_are_global_ranks_and_wrap_around():
    middle = Group("dp", ranks=(1, 5, 9), index=1, process_group=object())
    last = Group("dp", ranks=(1, 5, 9), index=2, process_group=object())
    assert (middle.rank, middle.prev, middle.next) == (5, 1, 9)
    assert (last.prev, last.next) == (5, 1)
    assert last.is_last
    assert not last.is_first


def test_a_group_of_one_is_first_last_and_its_own_neighbour():
    alone = Group.single_rank("tp", rank=3)
    assert (alone.size, alone.index, alone.rank, alone.next, alone.prev) == (1, 0, 3, 3, 3)
    assert alone.is_first
    assert alone.is_last


def test_a_larger_group_needs_a_process_group():
    with pytest.raises(AssertionError, match="would not run"):
        Group("dp", ranks=(0, 1), index=0)
