"""A context for one rank of a world of any size, in one process: torch's fake process group, which
sends nothing.

The values of other ranks are undefined; shapes, calls and bytes are right. The only file that
imports it from torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.topology.topology import Topology

# torch 2.10 has no collectives of tensors on the meta device.
HAS_META_COLLECTIVES = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta")


@contextmanager
def fake_context(topology: Topology, rank: int) -> Iterator[ParallelContext]:
    """The context of one rank; collectives return at once and leave the other ranks' values
    undefined. An all-to-all of equal shapes returns its input.
    """
    # importing it registers the backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=topology.world_size, store=FakeStore())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_to_all_single", _all_to_all_single)
            yield ParallelContext.attach(topology, timeout_s=1.0)
    finally:
        dist.destroy_process_group()


_fake_all_to_all = dist.all_to_all_single


def _all_to_all_single(
    output: torch.Tensor, tensor: torch.Tensor, *args: Any, **options: Any
) -> Any:
    """The input as output, so that numbers of rows are numbers: torch 2.11 leaves the output as it
    is, later versions copy.
    """
    handle = _fake_all_to_all(output, tensor, *args, **options)
    if output.shape == tensor.shape:
        output.copy_(tensor)
    return handle
