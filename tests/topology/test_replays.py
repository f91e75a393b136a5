"""Which rank computes a microbatch again: the same shards of all parameters, on another host."""

import pytest

from nanotrain.config.load import load
from nanotrain.config.parallel import ParallelConfig
from nanotrain.errors import ConfigError
from nanotrain.plan.plan import plan_run
from nanotrain.topology.partners import Host
from nanotrain.topology.replays import replay_distances, replica_of
from nanotrain.topology.topology import Topology


def topology_of(num_ranks: int, **sizes: int) -> Topology:
    return Topology.of(ParallelConfig(**sizes), num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "distances"),
    [
        (4, {}, (2, 1)),
        (8, {"tensor_model_parallel_size": 2}, (2, 1)),
        (2, {"tensor_model_parallel_size": 2}, ()),
        (8, {"expert_model_parallel_size": 2}, (4, 2)),
        (4, {"expert_model_parallel_size": 4}, ()),
    ],
    ids=["dp", "tp", "no replica", "experts", "one set of experts"],
)
def test_distances_lead_to_replicas_on_other_hosts_first(
    num_ranks: int, sizes: dict[str, int], distances: tuple[int, ...]
) -> None:
    topology = topology_of(num_ranks, **sizes)
    hosts = [Host(f"host-{rank * 2 // num_ranks}") for rank in range(num_ranks)]

    assert replay_distances(topology, hosts) == distances
    for distance in distances:
        for rank in range(num_ranks):
            other = replica_of(topology, rank, distance=distance)
            before, after = topology.coords(rank), topology.coords(other)
            same = [axis for axis in before if axis not in ("dp", "expert_dp")]
            assert other != rank and all(before[axis] == after[axis] for axis in same)


@pytest.mark.parametrize(
    ("num_ranks", "flags", "is_refused"),
    [
        (1, "", True),
        (2, "--tensor-model-parallel-size 2", True),
        (2, "--num-experts 2 --expert-model-parallel-size 2", True),
        (4, "--num-experts 2 --expert-model-parallel-size 2", False),
        (2, "", False),
    ],
    ids=["one rank", "tp alone", "one set of experts", "two sets of experts", "dp"],
)
def test_replays_need_a_second_replica(num_ranks: int, flags: str, is_refused: bool) -> None:
    sizes = "--mock-data --vocab-size 64 --num-attention-heads 4 --global-batch-size 12"
    line = f"+config=tiny {sizes} {flags}".split()
    plan_run(load(line).config, num_ranks, rank=0)  # without replays any of them is planned
    config = load([*line, "--replay-interval", "2"]).config
    if is_refused:
        with pytest.raises(ConfigError, match="without a second replica"):
            plan_run(config, num_ranks, rank=0)
    else:
        plan_run(config, num_ranks, rank=0)
