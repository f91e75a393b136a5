"""What the start of a rank costs: process groups, sockets and bytes through the rendezvous store. Pure.

A group whose ranks are those of another shares its process group. A gloo group connects each rank with every other one,
and each rank reads the addresses of all: `n * (154 + 8 * n)` bytes per rank of n ranks (measured, torch 2.13). NCCL
connects rings and trees when it is first used, of which nothing is counted here.
"""

from dataclasses import dataclass

from nanotrain.topology.topology import Topology


@dataclass(frozen=True)
class StartCost:
    """Of one rank."""

    num_process_groups: int  # on the backend of the device, the world included
    num_ranks: int  # of these groups together
    control_sockets: int  # of the control group over gloo
    control_store_bytes: int  # that this rank reads for it


def start_cost(topology: Topology, rank: int) -> StartCost:
    """The cost for a rank whose device is a GPU.

    Args:
        topology: of the run.
        rank: global rank.
    """
    groups = {spec.ranks for spec in topology.group_specs(rank).values() if spec.size > 1}
    size = topology.world_size
    return StartCost(
        num_process_groups=len(groups),
        num_ranks=sum(map(len, groups)),
        control_sockets=size - 1,
        control_store_bytes=size * (154 + 8 * size) if size > 1 else 0,
    )
