"""Group specs: neighbours wrap around, a single rank is its own neighbour, every name has its axes."""

import pytest

from nanotrain.topology.groups import DENSE_GROUPS, EXPERT_GROUPS, GROUP_NAMES, GroupSpec


def test_neighbours_are_global_ranks_and_wrap_around():
    middle, last = GroupSpec("dp", (1, 5, 9), 1), GroupSpec("dp", (1, 5, 9), 2)
    assert (middle.rank, middle.prev, middle.next) == (5, 1, 9)
    assert (last.prev, last.next) == (5, 1)
    assert last.is_last and not last.is_first


def test_a_single_rank_is_first_last_and_its_own_neighbour():
    spec = GroupSpec.single_rank("tp", rank=3)
    assert (spec.size, spec.index, spec.rank, spec.next, spec.prev) == (1, 0, 3, 3, 3)
    assert spec.is_first and spec.is_last


def test_a_rank_outside_the_group_has_no_spec():
    with pytest.raises(AssertionError, match="belongs to"):
        GroupSpec("dp", (1, 5), 2)


def test_every_name_has_axes_in_one_grid():
    assert sorted(GROUP_NAMES) == sorted([*DENSE_GROUPS, *EXPERT_GROUPS])
