"""A world of any size in one process: torch's fake process group, whose collectives send nothing.

Values of other ranks are not there, so results are never to be trusted; shapes, calls and bytes are. This is the only
file that knows where torch keeps it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """A default process group of `world_size` ranks, of which this process plays one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
