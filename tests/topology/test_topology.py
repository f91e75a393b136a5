"""The groups of a job: worked examples for both orders, and properties for all sizes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.parallel import ParallelConfig
from nanotrain.errors import TopologyError
from nanotrain.topology.groups import GROUP_NAMES
from nanotrain.topology.topology import CONTROL_FAN_OUT, Topology, control_levels, partitions
from tests.harness import parallel_config


def topology_of(world_size: int, *, strategy: str = "optim", **fields: object) -> Topology:
    parallel = ParallelConfig(data_parallel_sharding_strategy=strategy, **fields)  # type: ignore[arg-type]
    return Topology.of(parallel, world_size)


def ranks(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(digit) for digit in group) for group in text.split())


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any valid topology of up to some hundred ranks."""
    size = st.sampled_from([1, 2, 3, 4])
    tp, cp, dp, pp = (draw(size) for _ in range(4))
    world_size = tp * cp * dp * pp
    expert_ranks = world_size // pp
    etp = draw(st.sampled_from([n for n in (1, tp) if expert_ranks % n == 0]))
    ep = draw(
        st.sampled_from(
            [n for n in range(1, expert_ranks // etp + 1) if expert_ranks // etp % n == 0]
        )
    )
    expert_dp = expert_ranks // etp // ep
    strategy = draw(st.sampled_from(["no_shard", "optim", "optim_grads"]))
    fitting = [n for n in range(1, 5) if dp * cp % n == 0 and expert_dp % n == 0]
    return topology_of(
        world_size,
        strategy=strategy,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_distributed_optimizer_instances=1
        if strategy == "no_shard"
        else draw(st.sampled_from(fitting)),
        use_tp_pp_dp_mapping=draw(st.booleans()) and (pp == 1 or dp == expert_dp),
    )


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_worked_example_of_eight_ranks_tp2_pp2(strategy: str) -> None:
    topology = topology_of(
        8, strategy=strategy, tensor_model_parallel_size=2, pipeline_model_parallel_size=2
    )

    assert topology.groups_of("tp") == ranks("01 23 45 67")
    assert topology.groups_of("pp") == ranks("04 15 26 37")
    assert topology.groups_of("dp") == ranks("02 13 46 57")
    assert topology.groups_of("embed") == ranks("04 15 26 37")
    assert topology.groups_of("model") == ranks("0145 2367")


def test_worked_example_of_eight_ranks_tp2_pp2_with_pp_before_dp() -> None:
    topology = topology_of(
        8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, use_tp_pp_dp_mapping=True
    )

    assert topology.groups_of("tp") == ranks("01 23 45 67")
    assert topology.groups_of("pp") == ranks("02 13 46 57")
    assert topology.groups_of("dp") == ranks("04 15 26 37")


def test_without_experts_the_stage_of_a_rank_is_that_of_its_dense_group() -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        pipeline_model_parallel_size=2,
        use_tp_pp_dp_mapping=True,
    )
    # the expert grid has rank 1 on another stage
    topology = Topology.of(parallel, 8, has_experts=False)

    assert [topology.coords(rank)["pp"] for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_worked_example_of_eight_ranks_ep2() -> None:
    topology = topology_of(8, expert_model_parallel_size=2)

    assert topology.groups_of("dp") == ranks("01234567")
    assert topology.groups_of("ep") == ranks("01 23 45 67")
    assert topology.groups_of("expert_dp") == ranks("0246 1357")


def test_worked_example_of_eight_ranks_in_two_optimizer_instances() -> None:
    topology = topology_of(8, num_distributed_optimizer_instances=2)

    assert topology.groups_of("dp_shard") == ranks("0123 4567")
    assert topology.groups_of("dp_replicate") == ranks("04 15 26 37")


def test_without_sharding_every_rank_is_a_shard_group_of_its_own() -> None:
    topology = topology_of(4, strategy="no_shard")

    assert topology.groups_of("dp_shard") == ranks("0 1 2 3")
    assert topology.groups_of("dp_replicate") == topology.groups_of("dp_cp") == ranks("0123")


def test_the_embed_group_is_the_first_and_the_last_stage_only() -> None:
    topology = topology_of(4, pipeline_model_parallel_size=4)

    assert topology.groups_of("embed") == ranks("03")
    assert topology.members(1, "embed") == ()


def test_in_a_v_the_embed_group_is_the_first_rank() -> None:
    options = {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_schedule": "zb-v"}
    topology = topology_of(8, pipeline_model_parallel_size=4, **options)

    assert topology.groups_of("embed") == ranks("0 1")
    assert topology.end_ranks == (0,)


@given(topologies())
def test_the_groups_of_every_name_are_a_partition(topology: Topology) -> None:
    for name in GROUP_NAMES:
        groups = topology.groups_of(name)
        grouped = sorted(rank for group in groups for rank in group)
        if name == "embed":  # middle stages have none
            assert len(grouped) == len(set(grouped))
        else:
            assert grouped == list(range(topology.world_size))
        assert {len(group) for group in groups} == {topology.size(name)}


@given(topologies(), st.data())
def test_members_agree_with_the_list_of_groups(topology: Topology, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, topology.world_size - 1))

    for name in GROUP_NAMES:
        expected = [group for group in topology.groups_of(name) if rank in group]
        assert [topology.members(rank, name)] == (expected or [()])
        spec = topology.group_specs(rank).get(name)
        assert (spec.ranks if spec else ()) == topology.members(rank, name)
        assert spec is None or spec.rank == rank


@given(topologies(), st.data())
def test_coordinates_are_indices_in_the_groups(topology: Topology, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, topology.world_size - 1))

    for name, index in topology.coords(rank).items():
        assert topology.members(rank, name)[index] == rank


@given(topologies())
def test_shards_and_replicas_together_are_data_parallelism(topology: Topology) -> None:
    for prefix, both in (("dp", "dp_cp"), ("expert_dp", "expert_dp")):
        assert topology.size(f"{prefix}_shard") * topology.size(
            f"{prefix}_replicate"
        ) == topology.size(both)
        for rank in range(topology.world_size):
            shard, replicate = (
                topology.members(rank, f"{prefix}_shard"),
                topology.members(rank, f"{prefix}_replicate"),
            )
            assert set(shard) & set(replicate) == {rank}
            assert set(shard) | set(replicate) <= set(topology.members(rank, both))


def test_impossible_sizes_raise() -> None:
    with pytest.raises(TopologyError, match="6 ranks cannot form tp=4"):
        topology_of(6, tensor_model_parallel_size=4)


def test_planning_sixteen_thousand_ranks_is_not_quadratic() -> None:
    # 0.1 s where it was written; comparing ranks with ranks would exceed the test timeout
    topology = topology_of(16384, tensor_model_parallel_size=8, pipeline_model_parallel_size=16)
    groups = {name: topology.groups_of(name) for name in GROUP_NAMES}
    specs = topology.group_specs(9_999)

    assert {name: len(groups[name]) for name in ("tp", "dp", "pp")} == {
        "tp": 2048,
        "dp": 128,
        "pp": 1024,
    }
    assert all(specs[name].rank == 9_999 and specs[name].ranks in groups[name] for name in specs)
    assert "embed" not in specs


GPU_PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
LAYOUTS = {"tp 8, pp 4": {"tp": 8, "pp": 4}, "tp 8, pp 16, cp 2": {"tp": 8, "pp": 16, "cp": 2}}


def created_groups(topology: Topology, rank: int) -> list[tuple[int, ...]]:
    """The process groups of a rank besides the world."""
    return [ranks for groups in partitions(topology).values() for ranks in groups if rank in ranks]


def test_groups_with_the_same_ranks_share_one_process_group():
    # the world, dp, dp_cp and the other names of all ranks are one group
    assert created_groups(Topology.of(parallel_config(), 4), 0) == []
    assert created_groups(Topology.of(parallel_config(tp=2), 4), 3) == [(2, 3), (1, 3)]
    # the first and the last of two stages are both stages
    assert "embed" not in partitions(Topology.of(parallel_config(pp=2), 4))


@pytest.mark.parametrize(
    ("size", "fan_out"), [(1, 3), (2, 3), (7, 3), (32, 32), (33, 32), (100, 3)]
)
def test_the_control_tree_connects_every_rank_once(size, fan_out):
    groups = {
        ranks for rank in range(size) for ranks in control_levels(rank, size, fan_out=fan_out)
    }
    assert all(1 < len(ranks) <= fan_out for ranks in groups)
    # one parent each
    assert sorted(rank for ranks in groups for rank in ranks[1:]) == list(range(1, size))
    for rank in range(size):
        levels = control_levels(rank, size, fan_out=fan_out)
        assert all(rank in ranks for ranks in levels)
        # only the first rank goes on to the next level
        assert all(ranks[0] == rank for ranks in levels[:-1])
    assert CONTROL_FAN_OUT == 32


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [(1024, "tp 8, pp 4"), (1024, "tp 8, pp 16, cp 2"), (16384, "tp 8, pp 16, cp 2")],
)
def test_the_table_of_the_page_is_computed(num_ranks, layout):
    topology = Topology.of(parallel_config(**LAYOUTS[layout]), num_ranks)
    groups, sizes = created_groups(topology, 0), []
    for rank in (0, num_ranks - 1):
        sizes.append([len(ranks) for ranks in control_levels(rank, num_ranks)])
    sockets = [sum(size - 1 for size in of_rank) for of_rank in sizes]
    stored = [sum(size * (154 + 8 * size) for size in of_rank) / 1e3 for of_rank in sizes]
    # levels above the leaves have the same groups for their first ranks only
    levels = {
        ranks
        for rank in range(0, num_ranks, CONTROL_FAN_OUT)
        for ranks in control_levels(rank, num_ranks)
    }
    total = sum(len(ranks) * len(ranks) * (154 + 8 * len(ranks)) for ranks in levels)
    row = (
        f"| {num_ranks:,} | {layout} | {len(partitions(topology))} | {len(groups) + 1} | "
        f"{sum(map(len, groups)) + num_ranks:,} | {sockets[0]}, {sockets[1]} | {stored[0]:,.1f} kB, "
        f"{stored[1]:,.1f} kB | {total / 1e6:,.1f} MB |"
    )
    assert row in GPU_PAGE.read_text(), row
