"""The output of `nanotrain topology`: JSON is complete, the picture fits a terminal."""

import json

from nanotrain.config.parallel import ParallelConfig
from nanotrain.topology.groups import GROUP_NAMES
from nanotrain.topology.picture import render, run_topology
from nanotrain.topology.topology import Topology

TP2_PP4 = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=4)


def test_json_holds_every_group_of_every_name() -> None:
    printed = json.loads(run_topology(TP2_PP4, 16, as_json=True))

    assert tuple(printed) == GROUP_NAMES
    assert printed["tp"] == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert printed["dp"] == [
        [stage * 4 + tp, stage * 4 + tp + 2] for stage in range(4) for tp in range(2)
    ]
    assert printed["world"] == [list(range(16))]


def test_json_is_complete_however_large_the_world_is() -> None:
    printed = json.loads(
        run_topology(ParallelConfig(tensor_model_parallel_size=8), 12_000, as_json=True)
    )

    assert sum(len(group) for group in printed["tp"]) == 12_000


def test_shard_groups_are_shown_as_a_sharded_strategy_forms_them() -> None:
    # given: no strategy is configured
    unsharded = ParallelConfig()
    assert unsharded.data_parallel_sharding_strategy == "no_shard"

    # when
    printed = json.loads(
        run_topology(ParallelConfig(num_distributed_optimizer_instances=2), 8, as_json=True)
    )

    # then
    assert printed["dp_shard"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert "with no_shard" in run_topology(unsharded, 8, as_json=False)


def test_the_picture_of_a_small_world_is_complete() -> None:
    lines = run_topology(TP2_PP4, 16, as_json=False).splitlines()

    assert lines[:8] == [
        "16 ranks = tp 2 x cp 1 x dp 2 x pp 4",
        "",
        "         tp0  tp1",
        "pp0",
        "  dp0      0    1",
        "  dp1      2    3",
        "pp1",
        "  dp0      4    5",
    ]
    assert (
        "dp                    8 x 2  [0 2]  [1 3]  [4 6]  [5 7]  [8 10]  [9 11]  [12 14]  [13 15]"
        in lines
    )


def test_experts_have_a_second_picture_if_their_grid_differs() -> None:
    assert "experts:" not in render(Topology.of(TP2_PP4, 16))
    assert "experts: 8 ranks = etp 1 x ep 4" in render(
        Topology.of(ParallelConfig(expert_model_parallel_size=4), 8)
    )


def test_the_picture_of_a_large_world_fits_a_terminal() -> None:
    # given
    parallel = ParallelConfig(
        tensor_model_parallel_size=8,
        context_parallel_size=4,
        pipeline_model_parallel_size=16,
        expert_model_parallel_size=64,
        expert_tensor_parallel_size=1,
    )

    # when
    lines = render(Topology.of(parallel, 16_384)).splitlines()

    # then: the last rank is shown, most are not
    assert len(lines) < 100
    assert max(len(line) for line in lines) < 160
    assert any(line.endswith("16383") for line in lines)
