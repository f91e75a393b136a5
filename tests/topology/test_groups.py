"""Group specs: the view of one rank, a group of a single rank, every name has its axes."""

import pytest

from nanotrain.topology.groups import DENSE_GROUPS, EXPERT_GROUPS, GROUP_NAMES, GroupSpec


def test_a_spec_has_the_view_of_one_rank():
    spec = GroupSpec("dp", (1, 5, 9), 1)
    assert (spec.size, spec.rank, spec.is_first) == (3, 5, False)


def test_a_single_rank_is_a_group_of_its_own():
    spec = GroupSpec.single_rank("tp", rank=3)
    assert (spec.size, spec.index, spec.rank, spec.is_first) == (1, 0, 3, True)


def test_a_rank_outside_the_group_has_no_spec():
    with pytest.raises(AssertionError, match="belongs to"):
        GroupSpec("dp", (1, 5), 2)


def test_every_name_has_axes_in_one_grid():
    assert sorted(GROUP_NAMES) == sorted([*DENSE_GROUPS, *EXPERT_GROUPS])
