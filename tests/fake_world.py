"""A context for one rank of a world of any size, in one process: torch's fake process group, which
sends nothing.

The values of other ranks are undefined; shapes, calls and bytes are right. The only file that
imports it from torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.topology.topology import Topology

# torch 2.10 has no collectives of tensors on the meta device.
HAS_META_COLLECTIVES = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta")


@contextmanager
def fake_context(topology: Topology, rank: int) -> Iterator[ParallelContext]:
    """The context of one rank; collectives return at once and leave the other ranks' values
    undefined.
    """
    # importing it registers the backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=topology.world_size, store=FakeStore())
    try:
        yield ParallelContext.attach(topology, timeout_s=1.0)
    finally:
        dist.destroy_process_group()
