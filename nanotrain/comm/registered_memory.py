"""Memory of NCCL for flat buffers, registered with the groups that reduce and gather them.

NCCL reads and writes registered buffers in place: no copies through its own, fewer multiprocessors
for a collective, and reductions in the switch (NVLS, SHARP). Megatron-LM: `--nccl-ub`; NCCL user
guide, "User Buffer Registration".
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nanotrain.comm.device import allocating_in, memory_pool
from nanotrain.comm.group import Group

T = TypeVar("T")


def build_registered(
    build: Callable[[], T], groups: Sequence[Group], *, device: torch.device
) -> tuple[T, Any]:
    """Build an object whose tensors lie in NCCL's memory, and register them with the groups.

    Args:
        build: allocates the tensors; later allocations of the object are not registered.
        groups: groups of several ranks on NCCL; others are left out.
        device: device of the tensors.

    Returns:
        The object, and the pool of its memory, which has to live as long as its tensors; None where
        no group is on NCCL.
    """
    backends = [_nccl_backend(group, device) for group in groups if group.process_group is not None]
    registering = [backend for backend in backends if backend is not None]
    if not registering:
        return build(), None
    pool = memory_pool(registering[0].mem_allocator)
    with allocating_in(pool, device):
        built = build()
    # once and after all allocations: NCCL refuses memory that is registered twice
    for backend in registering:
        backend.register_mem_pool(pool)
    return built, pool


def _nccl_backend(group: Group, device: torch.device) -> Any:
    """The NCCL backend of a group; None with another one."""
    if device.type != "cuda" or dist.get_backend(group.process_group) != "nccl":
        return None
    process_group: Any = group.process_group
    return process_group._get_backend(device)
