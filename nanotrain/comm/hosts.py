"""The host and rack of each rank, and the address at which other hosts reach this one."""

import ipaddress
import os
import socket
from collections.abc import Mapping

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.group import Group
from nanotrain.topology.partners import Host


def own_host(environment: Mapping[str, str]) -> Host:
    """This machine, by its name, and its rack where Slurm knows it (`topology/tree`).

    `NANOTRAIN_HOST` replaces the name, where containers on several machines have one name.

    >>> own_host({"NANOTRAIN_HOST": "n7", "SLURM_TOPOLOGY_ADDR": "spine.rack3.n7"})
    Host(name='n7', rack='spine.rack3')
    """
    name = environment.get("NANOTRAIN_HOST") or socket.gethostname()
    return Host(name, environment.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0])


def gather_hosts(control: Group) -> tuple[Host, ...]:
    """The host of every rank. Collective."""
    return tuple(all_gather_object(own_host(os.environ), control))


def own_address() -> str:
    """The address of this machine in the network in which the ranks met."""
    meeting_point = os.environ.get("MASTER_ADDR", "localhost")
    try:
        found = socket.getaddrinfo(meeting_point, 9, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing; chooses the interface
            address = str(probe.getsockname()[0])
    except OSError:
        return meeting_point
    # on the machine of rank 0 its name may belong to the loopback interface
    is_loopback = ipaddress.ip_address(address).is_loopback
    return meeting_point if is_loopback else address
