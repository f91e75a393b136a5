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
from nanotrain.comm.work import Work
from nanotrain.parallel.dp.reduction import ReduceGroups, shard_of


class ShardGather:
    """The all-gathers of one bucket's parameters: of the shard across instances, of the bucket inside one.

    Args:
        full: [numel] the bucket.
        shard: [shard_numel] this rank's shard of it.
        groups: inside the instance and across instances.
    """

    def __init__(self, full: Tensor, shard: Tensor, *, groups: ReduceGroups) -> None:
        self.full, self.shard, self._groups = full, shard, groups
        self.update = shard_of(shard, groups.outer)  # [update_numel] what this rank's optimizer writes
        self._outer: Work[Tensor] | None = None
        self._inner: Work[Tensor] | None = None

    @property
    def is_gathering(self) -> bool:
        """Whether an all-gather was started and not yet waited for."""
        return self._outer is not None or self._inner is not None

    def start_across(self) -> None:
        """Start to collect the updated parts of the shard of all instances in `shard`."""
        self._outer = start_all_gather_into(self.shard, self.update, group=self._groups.outer)

    def start_inside(self) -> None:
        """Start to collect the shards of all ranks of the instance in `full`."""
        self.wait_across()
        self._inner = start_all_gather_into(self.full, self.shard, group=self._groups.shard)

    def wait_across(self) -> None:
        """Wait until `shard` holds the updated parameters."""
        work, self._outer = self._outer, None
        if work is not None:
            work.wait()

    def wait(self) -> None:
        """Wait until `shard`, and `full` where its all-gather was started, hold the updated parameters."""
        self.wait_across()
        work, self._inner = self._inner, None
        if work is not None:
            work.wait()


class ResidentParams:
    """Parameters at full size; each rank updates a part and all-gathers the others.

    Args:
        full: [numel] the bucket's slice of the parameter buffer.
        groups: of the bucket.
    """

    has_storage = True

    def __init__(self, full: Tensor, *, groups: ReduceGroups) -> None:
        self.full, self.shard = full, shard_of(full, groups.shard)
        self.gather = ShardGather(full, self.shard, groups=groups)

    def allocate(self) -> None:
        """Do nothing, as `keep_shard` and `free`: `full` always has storage."""

    keep_shard = free = allocate

    def start_all_gather(self) -> None:
        """Start to collect the shards of all ranks in `full`."""
        self.gather.start_inside()

    def wait(self) -> None:
        """Wait until `full` holds the updated parameters."""
        self.gather.wait()


class ShardedParams:
    """This rank's shard of the parameters (`optim_grads_params`); `full` has storage only while it is gathered.

    The storage of `full` is resized instead of replaced: autograd saves views of it in the forward and reads them in
    the backward, when it was gathered again.

    Args:
        numel: elements of the bucket.
        shard: [shard_numel] this rank's part, which the optimizer updates.
        groups: of the bucket.
    """

    def __init__(self, numel: int, shard: Tensor, *, groups: ReduceGroups) -> None:
        self.shard, self.full = shard, shard.new_empty(numel)
        self.gather = ShardGather(self.full, shard, groups=groups)
        self._part_of_full = shard_of(self.full, groups.shard)
        self._num_bytes = self.full.nbytes
        self.free()

    @property
    def has_storage(self) -> bool:
        """Whether `full` has storage."""
        return self.full.untyped_storage().nbytes() > 0

    def allocate(self) -> None:
        """Give `full` storage, with arbitrary values."""
        self.full.untyped_storage().resize_(self._num_bytes)

    def start_all_gather(self) -> None:
        """Start to collect the shards of all ranks in `full`, unless they are there or being collected."""
        if not self.has_storage:
            self.allocate()
            self.gather.start_inside()

    def wait(self) -> None:
        """Wait until `full` holds the parameters."""
        self.gather.wait()

    def keep_shard(self) -> None:
        """Copy this rank's part of `full` to `shard` and free the rest."""
        self.shard.copy_(self._part_of_full)
        self.free()

    def free(self) -> None:
        """Free the storage of `full`."""
        if self.has_storage:
            self.wait()
            self.full.untyped_storage().resize_(0)


class ResidentGrads:
    """Gradients at full size (`no_shard`, `optim`); the reduction is in place and `shard` is a view of `full`.

    Args:
        full: [numel] the bucket's slice of the gradient buffer.
        groups: of the bucket.
        main_dtype: of the gradients that the optimizer reads, by default that of `full`.
    """

    holds_pooled = False

    def __init__(self, full: Tensor, *, groups: ReduceGroups, main_dtype: torch.dtype | None = None) -> None:
        self._full, self.shard = full, shard_of(full, groups.shard)
        self._update = shard_of(self.shard, groups.outer)
        # [update_numel] what the optimizer reads; apart from the buffer where their dtypes differ
        self.main = self._update
        if main_dtype not in (None, full.dtype):
            self.main = torch.zeros_like(self._update, dtype=main_dtype)

    def full(self) -> Tensor:
        """[numel] storage of unreduced gradients, with arbitrary values where nothing was written."""
        return self._full

    def finish_inside(self, *, is_first: bool) -> None:
        """Do nothing: the reduced gradients are in `shard`."""

    def shard_to_reduce(self) -> Tensor:
        """[shard_numel] what is reduced across instances."""
        return self.shard

    def finish(self, shard: Tensor) -> None:
        """Copy the reduced gradients to `main`, given `shard_to_reduce` after its reduction."""
        if self.main is not self._update:
            self.main.copy_(self._update)


class GradPool:
    """Full-size gradient storage for transient stores; released storage is used again before any is allocated."""

    def __init__(self, numel: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._numel, self._device, self.dtype = numel, device, dtype
        self._free: list[Tensor] = []
        self.num_allocated = 0

    def acquire(self) -> Tensor:
        """Storage as large as the largest bucket, with arbitrary values."""
        if self._free:
            return self._free.pop()
        self.num_allocated += 1
        return torch.empty(self._numel, dtype=self.dtype, device=self._device)

    def release(self, storage: Tensor) -> None:
        """Return acquired storage."""
        self._free.append(storage)


class TransientGrads:
    """This rank's shard of the gradients (`optim_grads`); full-size storage exists from first write to reduction.

    Args:
        numel: elements of the bucket.
        shard: [shard_numel] accumulates the reduced gradients of the microbatches, in the dtype the optimizer reads.
        pool: source of full-size storage, in the dtype of the reduction.
        groups: of the bucket.
    """

    def __init__(self, numel: int, shard: Tensor, *, pool: GradPool, groups: ReduceGroups) -> None:
        self.shard, self.main = shard, shard_of(shard, groups.outer)
        self._numel, self._pool, self._groups = numel, pool, groups
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

    def finish_inside(self, *, is_first: bool) -> None:
        """Copy this rank's slice of the reduced `full` to `shard`, or add it after the first microbatch."""
        reduced = shard_of(self.full(), self._groups.shard)
        if is_first:
            self.shard.copy_(reduced)
        else:
            self.shard.add_(reduced)
        assert self._storage is not None, "`full` acquires it"
        self._pool.release(self._storage)
        self._storage = None

    def shard_to_reduce(self) -> Tensor:
        """[shard_numel] what is reduced across instances: `shard`, or a copy in the dtype of the reduction."""
        return self.shard.to(self._pool.dtype)

    def finish(self, shard: Tensor) -> None:
        """Copy the reduced gradients to `main`, given `shard_to_reduce` after its reduction."""
        if shard is not self.shard:
            self.main.copy_(shard_of(shard, self._groups.outer))


ParamStore = ResidentParams | ShardedParams
GradStore = ResidentGrads | TransientGrads
