"""`Axes`: groups of dense and expert grids as sets of the same digits."""

import pytest

from nanotrain.config.parallel import ParallelConfig
from nanotrain.prove.axes import Axes, Digit, Untypable
from nanotrain.topology.groups import GROUP_NAMES
from nanotrain.topology.topology import Topology


def topology_of(world_size: int, **sizes: object) -> Topology:
    return Topology.of(ParallelConfig(**sizes), world_size)  # type: ignore[arg-type]


def test_the_digits_of_a_group_are_the_ranks_that_it_joins() -> None:
    topology = topology_of(
        64,
        tensor_model_parallel_size=4,
        context_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=2,
        data_parallel_sharding_strategy="optim",
        num_distributed_optimizer_instances=2,
    )
    axes = Axes.of(topology)
    for name in GROUP_NAMES:
        if name == "embed":
            continue
        ranks = {0}
        for bit, digit in enumerate(axes.digits):
            if axes.masks[name] & 1 << bit:
                ranks = {rank + digit.stride * n for rank in ranks for n in range(digit.size)}
        assert ranks == set(topology.members(0, name)), name


def test_a_group_of_another_rank_has_the_same_digits() -> None:
    topology = topology_of(16, tensor_model_parallel_size=2, context_parallel_size=2)
    axes = Axes.of(topology)
    assert axes.mask(topology.members(13, "cp")) == axes.masks["cp"]
    assert axes.describe(axes.masks["tp"] | axes.masks["dp"]) == "tp and dp"


def test_the_first_and_the_last_stage_are_no_digit() -> None:
    topology = topology_of(8, pipeline_model_parallel_size=4)
    axes = Axes.of(topology, rank=1)
    assert axes.end_ranks == (1, 7)
    assert axes.digits == (Digit(1, 2), Digit(2, 4))
    assert axes.describe(axes.ends) == "the first and the last stage"


def test_groups_that_do_not_nest_have_no_axes() -> None:
    topology = topology_of(
        12,
        tensor_model_parallel_size=2,
        expert_model_parallel_size=3,
        expert_tensor_parallel_size=1,
    )
    with pytest.raises(Untypable, match="cannot be typed: .* multiples of 2 and of 3"):
        Axes.of(topology)
