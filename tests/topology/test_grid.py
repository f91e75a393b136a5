"""A grid numbers its ranks in the order of its axes; coordinates, members and groups agree."""

from math import prod

from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from numpy import arange

from nanotrain.topology.grid import Grid

AXES = ("tp", "cp", "dp", "pp")
grids = st.tuples(*[st.integers(1, 4)] * len(AXES)).map(lambda sizes: Grid(AXES, sizes))
axis_subsets = st.sets(st.sampled_from(AXES)).map(tuple)


@given(grids)
def test_coordinates_and_ranks_are_inverse(grid: Grid) -> None:
    assert [grid.rank(grid.coords(rank)) for rank in range(grid.world_size)] == list(range(grid.world_size))


@given(grids)
def test_the_first_axis_varies_fastest(grid: Grid) -> None:
    # given: the ranks arranged by einops, without strides
    ranks = rearrange(
        arange(grid.world_size), "(pp dp cp tp) -> tp cp dp pp", **dict(zip(AXES, grid.sizes, strict=True))
    )

    # then
    for rank in range(grid.world_size):
        coords = grid.coords(rank)
        assert ranks[tuple(coords[axis] for axis in AXES)] == rank


@given(grids, axis_subsets)
def test_groups_are_a_partition_of_the_ranks(grid: Grid, axes: tuple[str, ...]) -> None:
    groups = grid.groups(*axes)

    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    assert all(len(group) == prod(grid.size(axis) for axis in axes) for group in groups)
    assert list(groups) == sorted(groups)
    assert all(list(group) == sorted(group) for group in groups)


@given(grids, axis_subsets)
def test_members_of_a_group_differ_along_its_axes_only(grid: Grid, axes: tuple[str, ...]) -> None:
    for group in grid.groups(*axes):
        fixed = {tuple(grid.coords(rank)[axis] for axis in AXES if axis not in axes) for rank in group}
        assert len(fixed) == 1


@given(grids, axis_subsets, st.data())
def test_members_and_groups_agree(grid: Grid, axes: tuple[str, ...], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, grid.world_size - 1))

    assert grid.members(rank, *axes) == next(group for group in grid.groups(*axes) if rank in group)
