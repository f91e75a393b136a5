"""An allocation that fails while a run is built or trains, on the host or on a GPU, as one error with a cure."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanotrain.errors import LocalFault

HOST_ALLOCATOR = "can't allocate memory"  # in a plain RuntimeError


@contextmanager
def explaining_memory_errors(rank_text: str) -> Iterator[None]:
    """Raise errors of allocators in the block as a `LocalFault`; all others pass.

    Args:
        rank_text: names this rank, as "rank 1 (dp1)".
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        reason = str(error) or type(error).__name__
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and HOST_ALLOCATOR not in reason:
            raise
        raise LocalFault(
            f"{rank_text} ran out of memory",
            why=reason.splitlines()[0],
            fix="lower --micro-batch-size, or shard or recompute more (docs/troubleshooting.md); "
            "the same command resumes from the newest checkpoint",
        ) from error
