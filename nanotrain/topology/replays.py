"""Which rank computes the microbatch of which other one again: the same shards, another replica.

    dp0  dp1  dp2  dp3      a distance of 2: dp2 computes the microbatch of dp0, dp3 that of dp1

A rank of the same coordinates but along data parallelism has the same parameters. With experts the
ranks of a replica are those of an expert-parallel group, and all of them go to the same other one.
"""

from collections.abc import Sequence

from nanotrain.errors import ConfigError
from nanotrain.topology.partners import Host
from nanotrain.topology.topology import Topology

REPLICA_AXES = ("dp", "expert_dp")


def replay_distances(topology: Topology, hosts: Sequence[Host]) -> tuple[int, ...]:
    """Distances along dp between a rank and the replicas of it, the best first.

    The first has the most ranks whose replica is on another host; of equal ones the smallest.

    Args:
        topology: topology of the run.
        hosts: the host of each rank.

    Returns:
        At most two distances, for the replay and for the vote; empty without a second replica.
    """
    dp_size = topology.dense.size("dp")
    block = _smallest_distance(topology)
    scores = {}
    for distance in range(block, dp_size, block):
        ranks = range(topology.world_size)
        others = (replica_of(topology, rank, distance=distance) for rank in ranks)
        num_other = sum(
            hosts[rank].name != hosts[other].name for rank, other in zip(ranks, others, strict=True)
        )
        scores[distance] = -num_other, distance
    return tuple(sorted(scores, key=lambda distance: scores[distance])[:2])


def require_replicas(topology: Topology, *, replay_interval: int) -> None:
    """Check that replays find a second replica of all parameters.

    Args:
        topology: topology of the run.
        replay_interval: steps between replays; 0: none.

    Raises:
        ConfigError: there is no second replica.
    """
    if not replay_interval:
        return
    if _smallest_distance(topology) >= topology.dense.size("dp"):
        raise ConfigError(
            "--replay-interval without a second replica",
            why="no other rank has the same shards of all parameters",
            fix="leave it out, or train with data parallelism (of experts too)",
        )


def replica_of(topology: Topology, rank: int, *, distance: int) -> int:
    """The rank at a distance along dp, in a ring."""
    ranks = topology.members(rank, "dp")
    return ranks[(ranks.index(rank) + distance) % len(ranks)]


def _smallest_distance(topology: Topology) -> int:
    """The smallest distance along dp to a replica; the size of dp without one."""
    distance = 1
    while distance < topology.dense.size("dp") and not _is_replica_distance(topology, distance):
        distance += 1
    return distance


def _is_replica_distance(topology: Topology, distance: int) -> bool:
    """Whether all ranks at a distance along dp have the same shards of all parameters."""
    for rank in range(topology.world_size):
        coords = topology.coords(rank)
        others = topology.coords(replica_of(topology, rank, distance=distance))
        if any(coords[axis] != others[axis] for axis in coords if axis not in REPLICA_AXES):
            return False
    return True
