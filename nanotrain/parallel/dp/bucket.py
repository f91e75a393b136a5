"""One bucket: a stretch of the flat buffers whose gradients are reduced, and whose parameters are gathered, as one.

A bucket's gradients pass through four states in a step:

    empty --add_grad--> filling --start_reduce--> in flight --finish_reduce--> reduced

`ResidentBucket` owns a slice of a full-size gradient buffer: microbatches add up there and one reduction follows
the last of them. `TransientBucket` borrows full-size storage from a `GradPool` while it fills and is in flight;
what outlives the reduction is this rank's shard alone, and microbatches add up in it. Which of the two a run has
is chosen once, from the strategy's `shard_grads`.

Gradients are written, not zeroed and added: the first one of a step overwrites what the slot held before.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from nanotrain.comm.collectives import start_all_gather_into, start_all_reduce, start_reduce_scatter_into
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.parallel.dp.layout import BucketLayout


@dataclass(frozen=True)
class ReduceGroups:
    """Whom a bucket speaks to.

    Attributes:
        shard: ranks that each own a part of every bucket.
        replicate: ranks that own the same part as this one.
    """

    shard: Group
    replicate: Group


class GradPool:
    """Full-size gradient storage on loan; freed storage is lent again before any is allocated."""

    def __init__(self, numel: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._numel, self._device, self._dtype = numel, device, dtype
        self._free: list[torch.Tensor] = []
        self.num_allocated = 0

    def take(self) -> torch.Tensor:
        """Storage as large as the largest bucket; its contents are arbitrary."""
        if self._free:
            return self._free.pop()
        self.num_allocated += 1
        return torch.empty(self._numel, dtype=self._dtype, device=self._device)

    def give(self, storage: torch.Tensor) -> None:
        """Return storage that was taken."""
        self._free.append(storage)


class Bucket(ABC):
    """The part that both kinds share: slots, parameters, and the halves of each collective.

    Args:
        layout: where the slots lie.
        params: [layout.numel] this bucket's slice of the flat parameter buffer.
        groups: whom to reduce with.
    """

    def __init__(self, layout: BucketLayout, params: torch.Tensor, *, groups: ReduceGroups) -> None:
        self.layout, self.params, self.groups = layout, params, groups
        self.param_shard = self._shard_of(params)
        self.grad_shard: torch.Tensor
        self._ranges = {slot.name: (slot.start - layout.start, slot.stop - layout.start) for slot in layout.slots}
        self._gaps = _gaps(layout)
        self._written: set[str] = set()
        self._missing: set[str] = set()
        self._reduce: Work[torch.Tensor] | None = None
        self._gather: Work[torch.Tensor] | None = None
        self.is_in_flight = False

    @property
    def is_open(self) -> bool:
        """Whether this bucket holds storage of a pool."""
        return False

    @abstractmethod
    def begin_step(self) -> None:
        """Forget the last step's gradients."""

    @abstractmethod
    def add_grad(self, name: str, grad: torch.Tensor) -> None:
        """Take one parameter's gradient of one microbatch."""

    @abstractmethod
    def start_reduce(self) -> None:
        """Begin to sum the gradients over the ranks."""

    @abstractmethod
    def finish_reduce(self) -> None:
        """Wait until `grad_shard` holds the sum."""

    def slot(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """The elements of one parameter in a flat tensor of this bucket's size."""
        start, stop = self._ranges[name]
        return flat[start:stop]

    @property
    def is_ready(self) -> bool:
        """Whether every gradient of the current backward pass has arrived."""
        return not self._missing

    def expect_all(self) -> None:
        """A backward pass begins: no gradient of it has arrived."""
        self._missing = set(self._ranges)

    def start_all_gather(self) -> None:
        """Begin to collect every rank's updated parameters."""
        self._gather = start_all_gather_into(self.params, self.param_shard, group=self.groups.shard)

    def finish_gather(self) -> None:
        """Wait until the parameters of this bucket are complete."""
        work, self._gather = self._gather, None
        if work is not None:
            work.wait()

    def _start_collectives(self, grads: torch.Tensor, shard: torch.Tensor) -> None:
        self._reduce = start_reduce_scatter_into(shard, grads, group=self.groups.shard)
        if self.groups.shard.size == 1:
            self._reduce = start_all_reduce(shard, self.groups.replicate)
        self.is_in_flight = True

    def _finish_collectives(self) -> None:
        work, self._reduce = self._reduce, None
        if work is not None:
            work.wait()
        self.is_in_flight = False

    def _zero_unwritten(self, grads: torch.Tensor) -> None:
        """Parameters without a gradient, and padding, must not carry leftovers into the sum."""
        for name in self._ranges.keys() - self._written:
            self.slot(name, grads).zero_()
        for start, stop in self._gaps:
            grads[start:stop].zero_()

    def _shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        size, index = self.layout.shard_numel, self.groups.shard.index
        return flat[index * size : (index + 1) * size]


class ResidentBucket(Bucket):
    """A bucket with gradients of its own at full size (`no_shard`, `optim`).

    Args:
        grads: [layout.numel] this bucket's slice of the flat gradient buffer.
    """

    def __init__(
        self, layout: BucketLayout, params: torch.Tensor, *, groups: ReduceGroups, grads: torch.Tensor
    ) -> None:
        super().__init__(layout, params, groups=groups)
        self.grads = grads
        self.grad_shard = self._shard_of(grads)

    def begin_step(self) -> None:
        self._written.clear()

    def add_grad(self, name: str, grad: torch.Tensor) -> None:
        target = self.slot(name, self.grads).view_as(grad)
        if name in self._written:
            target.add_(grad)
        else:
            target.copy_(grad)
            self._written.add(name)
        self._missing.discard(name)

    def start_reduce(self) -> None:
        self._zero_unwritten(self.grads)
        self._start_collectives(self.grads, self.grad_shard)

    def finish_reduce(self) -> None:
        self._finish_collectives()


class TransientBucket(Bucket):
    """A bucket that keeps its shard of the gradients only (`optim_grads`).

    Args:
        grad_shard: [layout.shard_numel] where the reduced gradients of the microbatches add up.
        pool: lends full-size storage.
    """

    def __init__(
        self,
        layout: BucketLayout,
        params: torch.Tensor,
        *,
        groups: ReduceGroups,
        grad_shard: torch.Tensor,
        pool: GradPool,
    ) -> None:
        super().__init__(layout, params, groups=groups)
        self.grad_shard = grad_shard
        self._pool = pool
        self._borrowed: torch.Tensor | None = None
        self._is_first_reduction = True

    def begin_step(self) -> None:
        self._is_first_reduction = True

    def add_grad(self, name: str, grad: torch.Tensor) -> None:
        self.slot(name, self._storage()).view_as(grad).copy_(grad)
        self._written.add(name)
        self._missing.discard(name)

    @property
    def is_open(self) -> bool:
        return self._borrowed is not None

    def start_reduce(self) -> None:
        grads = self._storage()[: self.layout.numel]
        self._zero_unwritten(grads)
        self._start_collectives(grads, self._shard_of(grads))

    def finish_reduce(self) -> None:
        self._finish_collectives()
        storage, self._borrowed = self._storage(), None
        reduced = self._shard_of(storage)
        if self._is_first_reduction:
            self.grad_shard.copy_(reduced)
        else:
            self.grad_shard.add_(reduced)
        self._is_first_reduction = False
        self._written.clear()
        self._pool.give(storage)

    def _storage(self) -> torch.Tensor:
        if self._borrowed is None:
            self._borrowed = self._pool.take()
        return self._borrowed


def _gaps(layout: BucketLayout) -> tuple[tuple[int, int], ...]:
    """The [start, stop) ranges in the bucket that belong to no slot."""
    edges = [layout.start, *(edge for slot in layout.slots for edge in (slot.start, slot.stop)), layout.stop]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((start - layout.start, stop - layout.start) for start, stop in gaps if start < stop)
