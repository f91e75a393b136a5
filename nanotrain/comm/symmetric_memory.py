"""torch's symmetric memory: memory of a rank that other GPUs of its node read and write.

has_symmetric_memory    whether the ranks of a group share memory, tried once
group_name              the name of a group in torch's operators
"""

import socket
from typing import Any

import torch
import torch.distributed as dist

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.group import Group

FIRST_BYTES = 2**20  # of the workspace on trial; torch enlarges it for larger inputs


def group_name(group: Group) -> Any:
    """The name of a group's process group, as torch's operators of symmetric memory take it."""
    assert group.process_group is not None, "a group of one rank sends nothing"
    return group.process_group.group_name


def has_symmetric_memory(group: Group, device: torch.device) -> bool:
    """Whether the GPUs of a group can read each other's memory; the same on all its ranks.

    Tried with a workspace: driver, container or topology may forbid it. Called by all ranks of the
    group.
    """
    if device.type != "cuda" or dist.get_backend(group.process_group) != "nccl":
        return False
    if len(set(all_gather_object(socket.gethostname(), group))) > 1:
        return False
    return all(all_gather_object(_try_workspace(group), group))


def _try_workspace(group: Group) -> bool:
    """Whether torch can allocate symmetric memory over the group."""
    from torch.distributed import _symmetric_memory

    try:
        _symmetric_memory.get_symm_mem_workspace(group_name(group), FIRST_BYTES)
    except (RuntimeError, AttributeError, ImportError):
        return False
    return True
