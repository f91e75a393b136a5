"""Reusable receive buffers of collectives in host memory.

A new 16 MiB block costs 4096 page faults, which take as long as receiving the data (measured), and every free returns
it to the system. So blocks are kept; there are never more of them than collectives in flight at the same time.
"""

import torch
from torch import Tensor


class Scratch:
    """A pool of blocks of host memory."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` uninitialized elements; return them with `give`."""
        num_bytes = numel * dtype.itemsize
        fitting = [block for block in self._free if block.numel() >= num_bytes]
        if fitting:
            block = min(fitting, key=Tensor.numel)
            self._free = [other for other in self._free if other is not block]
        else:
            self._free = sorted(self._free, key=Tensor.numel)[1:]  # the new block replaces the smallest one
            block = torch.empty(num_bytes, dtype=torch.uint8)
        return block[:num_bytes].view(dtype)

    def give(self, tensor: Tensor) -> None:
        """Return memory obtained by `take`."""
        block = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._free.append(block)
