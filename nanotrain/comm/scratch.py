"""Memory that collectives receive into, used again and again.

A fresh 16 MiB block costs 4096 page faults, as long as receiving it takes (measured), and is given back to the system
on every free; so blocks are kept. There are never more of them than collectives were in flight at once.
"""

import torch
from torch import Tensor


class Scratch:
    """Blocks of host memory lent to collectives in flight."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Borrow `numel` elements of undefined value; hand them back with `give`."""
        num_bytes = numel * dtype.itemsize
        fitting = [block for block in self._free if block.numel() >= num_bytes]
        if fitting:
            block = min(fitting, key=Tensor.numel)
            self._free = [other for other in self._free if other is not block]
        else:
            self._free = sorted(self._free, key=Tensor.numel)[1:]  # the new block takes the smallest one's place
            block = torch.empty(num_bytes, dtype=torch.uint8)
        return block[:num_bytes].view(dtype)

    def give(self, lent: Tensor) -> None:
        """Take back what `take` lent."""
        block = torch.empty(0, dtype=torch.uint8).set_(lent.untyped_storage())
        self._free.append(block)
