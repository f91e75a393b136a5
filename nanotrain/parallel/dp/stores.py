"""Storage of one bucket: a parameter store and a gradient store, chosen from the strategy's traits.

    parameters   ResidentParams    full size all the time
                 ShardedParams     this rank's shard all the time, full size while a unit is gathered
    gradients    ResidentGrads     full size all the time; microbatches accumulate at full size, one reduction per step
                 TransientGrads    full size while a microbatch fills it, then only this rank's shard accumulates

A full-size gradient of a transient store comes from a `GradPool`, so that freed storage is used again.
"""

import torch
from torch import Tensor

from nanotrain.comm.collectives import start_all_gather_into
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work


class ResidentParams:
    """Parameters at full size; each rank updates its shard and all-gathers the others.

    Args:
        full: [numel] the bucket's slice of the parameter buffer.
        group: the shard group.
    """

    def __init__(self, full: Tensor, *, group: Group) -> None:
        self.full, self.shard = full, shard_of(full, group)
        self._group = group
        self._work: Work[Tensor] | None = None

    @property
    def is_gathering(self) -> bool:
        """Whether an all-gather was started and not yet waited for."""
        return self._work is not None

    def allocate(self) -> None:
        """Do nothing, as `keep_shard` and `free`: `full` always has storage."""

    keep_shard = free = allocate

    def start_all_gather(self) -> None:
        """Start to collect the shards of all ranks in `full`."""
        self._work = start_all_gather_into(self.full, self.shard, group=self._group)

    def wait(self) -> None:
        """Wait until `full` holds the updated parameters."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


class ShardedParams:
    """This rank's shard of the parameters (`optim_grads_params`); `full` has storage only while it is gathered.

    The storage of `full` is resized instead of replaced: autograd saves views of it in the forward and reads them in
    the backward, when it was gathered again.

    Args:
        numel: elements of the bucket.
        shard: [shard_numel] this rank's part, which the optimizer updates.
        group: the shard group.
    """

    def __init__(self, numel: int, shard: Tensor, *, group: Group) -> None:
        self.shard, self.full = shard, shard.new_empty(numel)
        self._group, self._num_bytes = group, self.full.nbytes
        self._work: Work[Tensor] | None = None
        self.free()

    @property
    def has_storage(self) -> bool:
        """Whether `full` has storage."""
        return self.full.untyped_storage().nbytes() > 0

    @property
    def is_gathering(self) -> bool:
        """Whether an all-gather was started and not yet waited for."""
        return self._work is not None

    def allocate(self) -> None:
        """Give `full` storage, with arbitrary values."""
        self.full.untyped_storage().resize_(self._num_bytes)

    def start_all_gather(self) -> None:
        """Start to collect the shards of all ranks in `full`, unless they are there or being collected."""
        if not self.has_storage:
            self.allocate()
            self._work = start_all_gather_into(self.full, self.shard, group=self._group)

    def wait(self) -> None:
        """Wait until `full` holds the parameters."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def keep_shard(self) -> None:
        """Copy this rank's part of `full` to `shard` and free the rest."""
        self.shard.copy_(shard_of(self.full, self._group))
        self.free()

    def free(self) -> None:
        """Free the storage of `full`."""
        self.wait()
        self.full.untyped_storage().resize_(0)


class ResidentGrads:
    """Gradients at full size (`no_shard`, `optim`); the reduction is in place and `shard` is a view of `full`.

    Args:
        full: [numel] the bucket's slice of the gradient buffer.
        group: the shard group.
    """

    holds_pooled = False

    def __init__(self, full: Tensor, *, group: Group) -> None:
        self._full, self.shard = full, shard_of(full, group)

    def full(self) -> Tensor:
        """[numel] storage of unreduced gradients, with arbitrary values where nothing was written."""
        return self._full

    def finish_reduce_scatter(self, *, is_first: bool) -> None:
        """Do nothing: the reduced gradients are in `shard`."""


class GradPool:
    """Full-size gradient storage for transient stores; released storage is used again before any is allocated."""

    def __init__(self, numel: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._numel, self._device, self._dtype = numel, device, dtype
        self._free: list[Tensor] = []
        self.num_allocated = 0

    def acquire(self) -> Tensor:
        """Storage as large as the largest bucket, with arbitrary values."""
        if self._free:
            return self._free.pop()
        self.num_allocated += 1
        return torch.empty(self._numel, dtype=self._dtype, device=self._device)

    def release(self, storage: Tensor) -> None:
        """Return acquired storage."""
        self._free.append(storage)


class TransientGrads:
    """This rank's shard of the gradients (`optim_grads`); full-size storage exists from first write to reduction.

    Args:
        numel: elements of the bucket.
        shard: [shard_numel] accumulates the reduced gradients of the microbatches.
        pool: source of full-size storage.
        group: the shard group.
    """

    def __init__(self, numel: int, shard: Tensor, *, pool: GradPool, group: Group) -> None:
        self.shard = shard
        self._numel, self._pool, self._group = numel, pool, group
        self._storage: Tensor | None = None

    @property
    def holds_pooled(self) -> bool:
        """Whether full-size storage of the pool is in use."""
        return self._storage is not None

    def full(self) -> Tensor:
        """[numel] storage of unreduced gradients, with arbitrary values where nothing was written."""
        if self._storage is None:
            self._storage = self._pool.acquire()
        return self._storage[: self._numel]

    def finish_reduce_scatter(self, *, is_first: bool) -> None:
        """Copy this rank's slice of the reduced `full` to `shard`, or add it after the first microbatch."""
        reduced = shard_of(self.full(), self._group)
        if is_first:
            self.shard.copy_(reduced)
        else:
            self.shard.add_(reduced)
        assert self._storage is not None, "`full` acquires it"
        self._pool.release(self._storage)
        self._storage = None


ParamStore = ResidentParams | ShardedParams
GradStore = ResidentGrads | TransientGrads


def shard_of(full: Tensor, group: Group) -> Tensor:
    """View of this rank's shard of a bucket: the index-th of `group.size` equal slices."""
    numel = full.numel() // group.size
    return full[group.index * numel : (group.index + 1) * numel]
