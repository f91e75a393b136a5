"""A grid numbers its ranks in the order of its axes; coordinates, members and groups agree."""

import re
from dataclasses import replace
from math import prod

import pytest
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from numpy import arange

from nanotrain.config.parallel import ParallelConfig
from nanotrain.errors import TopologyError
from nanotrain.topology.grid import Grid, arrange
from nanotrain.topology.topology import Topology

AXES = ("tp", "cp", "dp", "pp")
grids = st.tuples(*[st.integers(1, 4)] * len(AXES)).map(lambda sizes: Grid(AXES, sizes))
axis_subsets = st.sets(st.sampled_from(AXES)).map(tuple)


@given(grids)
def test_coordinates_and_ranks_are_inverse(grid: Grid) -> None:
    assert [grid.rank(grid.coords(rank)) for rank in range(grid.world_size)] == list(
        range(grid.world_size)
    )


@given(grids)
def test_the_first_axis_varies_fastest(grid: Grid) -> None:
    # given: the ranks arranged by einops, without strides
    ranks = rearrange(
        arange(grid.world_size),
        "(pp dp cp tp) -> tp cp dp pp",
        **dict(zip(AXES, grid.sizes, strict=True)),
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
        fixed = {
            tuple(grid.coords(rank)[axis] for axis in AXES if axis not in axes) for rank in group
        }
        assert len(fixed) == 1


@given(grids, axis_subsets, st.data())
def test_members_and_groups_agree(grid: Grid, axes: tuple[str, ...], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, grid.world_size - 1))

    assert grid.members(rank, *axes) == next(group for group in grid.groups(*axes) if rank in group)


sizes = st.integers(1, 5)


def message_of(world_size: int, **fields: object) -> str:
    with pytest.raises(TopologyError) as caught:
        arrange(ParallelConfig(**fields), world_size)  # type: ignore[arg-type]
    return str(caught.value)


def test_the_message_has_the_ranks_the_product_and_the_fix() -> None:
    assert message_of(8, tensor_model_parallel_size=4, pipeline_model_parallel_size=4) == (
        "8 ranks cannot form tp=4 x pp=4: tp*cp*pp = 16 must divide the world size; "
        "set --pipeline-model-parallel-size 2 or run on 16 ranks"
    )


def test_expert_axes_that_do_not_fit_are_named() -> None:
    assert message_of(8, expert_model_parallel_size=3) == (
        "8 ranks cannot form ep=3: etp*ep*pp = 3 must divide the world size; "
        "set --expert-model-parallel-size 2 or run on 9 ranks"
    )


@given(world_size=st.integers(1, 40), tp=sizes, cp=sizes, pp=sizes, ep=sizes, etp=st.none() | sizes)
def test_every_suggested_fix_works(
    world_size: int, tp: int, cp: int, pp: int, ep: int, etp: int | None
) -> None:
    # given
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    try:
        dense, expert = arrange(parallel, world_size)
    except TopologyError as error:
        # then: both the smaller axis and the other number of ranks are accepted
        for flag, size in re.findall(r"set --(\S+) (\d+)", error.fix):
            arrange(replace(parallel, **{flag.replace("-", "_"): int(size)}), world_size)
        (ranks,) = re.findall(r"run on (\d+) ranks", error.fix)
        dense, expert = arrange(parallel, int(ranks))
        world_size = int(ranks)

    # then: both grids contain all ranks
    assert dense.world_size == expert.world_size == world_size


def test_pp_before_dp_raises_if_a_rank_would_have_two_stages() -> None:
    message = message_of(
        8, use_tp_pp_dp_mapping=True, pipeline_model_parallel_size=2, expert_model_parallel_size=2
    )

    assert "dp=4 and expert_dp=2 with pp=2" in message
    assert "drop --use-tp-pp-dp-mapping" in message


@given(world_size=st.integers(1, 32), tp=sizes, cp=sizes, pp=sizes, ep=sizes, before=st.booleans())
def test_a_rank_has_one_stage_in_both_grids(
    world_size: int, tp: int, cp: int, pp: int, ep: int, before: bool
) -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        use_tp_pp_dp_mapping=before,
    )
    try:
        dense, expert = arrange(parallel, world_size)
    except TopologyError:
        return

    for rank in range(world_size):
        assert dense.coords(rank)["pp"] == expert.coords(rank)["pp"]


def test_pp_before_dp_needs_no_expert_grid_without_experts() -> None:
    parallel = ParallelConfig(
        use_tp_pp_dp_mapping=True, pipeline_model_parallel_size=2, context_parallel_size=2
    )
    with pytest.raises(TopologyError, match="drop --use-tp-pp-dp-mapping"):
        arrange(parallel, 8)

    dense, _ = arrange(parallel, 8, has_experts=False)

    assert dense.axes == ("tp", "cp", "pp", "dp") and dense.sizes == (1, 2, 2, 2)
    topology = Topology.of(parallel, 8, has_experts=False)
    for rank in range(8):
        assert (
            topology.coords(rank)["pp"]
            == topology.group_specs(rank)["pp"].index
            == dense.coords(rank)["pp"]
        )


def test_whole_experts_are_suggested_first() -> None:
    sizes = {
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 16,
        "expert_model_parallel_size": 32,
    }
    assert message_of(1024, **sizes).endswith(
        "set --expert-tensor-parallel-size 1 or run on 4,096 ranks"
    )


def test_instances_must_divide_the_data_parallel_ranks() -> None:
    message = message_of(8, num_distributed_optimizer_instances=3)

    assert message == (
        "3 optimizer instances cannot share dp*cp = 8 ranks: --num-distributed-optimizer-instances must divide "
        "dp*cp = 8 and expert_dp = 8; set --num-distributed-optimizer-instances 2"
    )


def test_instances_must_divide_the_expert_data_parallel_ranks() -> None:
    message = message_of(8, num_distributed_optimizer_instances=4, expert_model_parallel_size=4)

    assert "expert_dp = 2" in message
    assert message.endswith("set --num-distributed-optimizer-instances 2")


def test_zero_ranks_raise() -> None:
    assert "0 ranks" in message_of(0)
