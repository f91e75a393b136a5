"""Storage of one bucket: a parameter store and a gradient store, chosen from the strategy's traits.

    parameters   ParamStore        full size all the time
                 ShardedParams     this rank's shard all the time, full size while gathered
                 PooledParams      the same, gathered in blocks of memory that units share
    gradients    ResidentGrads     full size all the time; one reduction per step
                 TransientGrads    full size while a microbatch fills it; only the shard accumulates

Transient stores borrow full-size memory that holds two successive buckets. Buckets borrow in turn
from its start and up to its end, so a bucket waits for the reduction of the last but one, and the
memory has the size of two neighbours. `build_params` and `build_grads` allocate the stores of all
buckets of a layout.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.collectives import local_slice, start_all_gather_into
from nanotrain.comm.work import Work
from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.parallel.dp.options import DataParallelOptions, ReduceGroups
from nanotrain.precision.dtypes import Precision

shard_of = partial(local_slice, dim=0)  # view of this rank's shard of a flat tensor


class ParamStore:
    """Parameters of one bucket at full size; each rank updates its shard, then all-gathers.

    Updated parts are collected in `shard` across instances (`start_across`), then shards in `full`
    inside an instance.

    Args:
        full: [numel] parameters of the bucket.
        groups: groups of the bucket.
        shard: [shard_numel] this rank's shard, by default its part of `full`.
        update: [update_numel] elements that this rank's optimizer writes, by default its part of
            `shard`.
    """

    separate: Tensor | None = None  # [numel] parameters gathered outside `full`

    def __init__(
        self,
        full: Tensor,
        *,
        groups: ReduceGroups,
        shard: Tensor | None = None,
        update: Tensor | None = None,
    ) -> None:
        self.full = full
        self.shard = shard_of(full, groups.shard) if shard is None else shard
        # [update_numel] what this rank sends to the others
        self.sent = shard_of(self.shard, groups.outer)
        self.update = self.sent if update is None else update
        self._groups = groups
        # all-gathers that were started and not yet waited for
        self.gathers: list[Work[Tensor]] = []
        self.free()

    def start_across(self) -> None:
        """Start to collect the updated parts of the shard of all instances in `shard`."""
        self.gathers.append(start_all_gather_into(self.shard, self.sent, group=self._groups.outer))

    def start_all_gather(self) -> None:
        """Start to collect the shards of all ranks of the instance in `full`."""
        self.wait()
        self.gathers.append(start_all_gather_into(self.full, self.shard, group=self._groups.shard))

    def wait(self) -> None:
        """Wait until `shard`, and `full` if its all-gather was started, are up to date."""
        while self.gathers:
            self.gathers.pop(0).wait()

    def wait_before_forward(self, *_hook_arguments: Any) -> None:
        """`wait`, as a hook of a module that reads the parameters."""
        self.wait()

    def allocate(self) -> None:
        """Do nothing: `full` always has storage. The same holds for `free` and `gather_apart`."""

    free = gather_apart = allocate


class ShardedParams(ParamStore):
    """This rank's shard of the parameters (`optim_grads_params`); `full` is empty between gathers.

    The storage of `full` is resized, not replaced: autograd saves views of it in the forward and
    reads them in the backward, after the unit has been gathered again. It is freed at first.
    """

    @property
    def has_storage(self) -> bool:
        """Whether `full` has memory."""
        return self.full.untyped_storage().nbytes() > 0

    def allocate(self) -> None:
        """Give `full` memory, with arbitrary values."""
        self.full.untyped_storage().resize_(self.full.nbytes)

    def start_all_gather(self) -> None:
        """Start to collect the shards of all ranks in `full`, unless that was done."""
        if not self.has_storage:
            self.allocate()
            super().start_all_gather()

    def gather_apart(self) -> None:
        """Collect the parameters in `full`, or in `separate` memory if units share the block."""
        self.start_all_gather()
        self.wait()

    def free(self) -> None:
        """Free the memory of `full`."""
        if self.has_storage:
            self.wait()
            self.full.untyped_storage().resize_(0)


class PooledParams(ShardedParams):
    """A shard whose `full` is in a block that several units share (`--fsdp-double-buffer`).

    Nothing is allocated in a step, and on CUDA gathers start without waiting for freed memory.
    Autograd saves views of the block in the forward; when the backward reads them, the block holds
    the same unit again.

    Args:
        full: [numel] view of the block.
        unit: FSDP unit of the bucket.
        users: units and buckets that use the block at the moment, shared by its buckets.
        stores: groups, shard and update as for `ParamStore`.
    """

    def __init__(
        self, full: Tensor, *, unit: str, users: set[tuple[str, int]], **stores: Any
    ) -> None:
        self._unit = unit
        self._users = users
        self._key = (unit, int(full.storage_offset()))
        super().__init__(full, **stores)

    @property
    def has_storage(self) -> bool:
        """Whether the block holds this bucket."""
        return self._key in self._users

    def allocate(self) -> None:
        """Take the block, with arbitrary values."""
        assert all(unit == self._unit for unit, _ in self._users), (
            f"{self._users} would be overwritten by {self._unit}"
        )
        self._users.add(self._key)

    def gather_apart(self) -> None:
        """Collect the parameters in new memory, `separate`."""
        self.wait()
        self.separate = torch.empty_like(self.full)
        start_all_gather_into(self.separate, self.shard, group=self._groups.shard).wait()

    def free(self) -> None:
        """Let another unit use the block."""
        self.separate = None
        if self.has_storage:
            self.wait()
            self._users.discard(self._key)


class ResidentGrads:
    """Gradients at full size (`no_shard`, `optim`); the reduction is in place.

    Args:
        full: [numel] the bucket's slice of the gradient buffer.
        groups: groups of the bucket.
        main_dtype: dtype of the gradients that the optimizer reads; by default as `full`.
    """

    is_open = True  # see `TransientGrads`

    def __init__(
        self, full: Tensor, *, groups: ReduceGroups, main_dtype: torch.dtype | None = None
    ) -> None:
        self._full = full
        self.shard = shard_of(full, groups.shard)  # a view of the full gradients
        self._update = shard_of(self.shard, groups.outer)
        # [update_numel] read by the optimizer; a separate tensor if the buffer has another dtype
        self.main = self._update
        if main_dtype not in (None, full.dtype):
            self.main = torch.zeros_like(self._update, dtype=main_dtype)

    def overlaps(self, other: "GradStore") -> bool:
        """Whether the other store has the same memory."""
        return self is other

    def full(self) -> Tensor:
        """[numel] storage of unreduced gradients; values that were not written are arbitrary."""
        return self._full

    def finish_inside(self, *, is_first: bool) -> None:
        """Do nothing: the reduced gradients are in `shard`."""

    def shard_to_reduce(self) -> Tensor:
        """[shard_numel]: the gradients that are reduced across instances."""
        return self.shard

    def finish(self, shard: Tensor) -> None:
        """Copy the reduced gradients to `main`, given `shard_to_reduce` after its reduction."""
        if self.main is not self._update:
            self.main.copy_(self._update)


class GradMemory:
    """Memory for full-size gradients of two successive buckets, allocated at the first use."""

    def __init__(self, numel: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._numel = numel
        self._device = device
        self.dtype = dtype

    @cached_property
    def tensor(self) -> Tensor:
        """[numel], with arbitrary values."""
        return torch.empty(self._numel, dtype=self.dtype, device=self._device)


class TransientGrads:
    """This rank's shard of the gradients (`optim_grads`).

    Full-size memory is borrowed from the first write to the reduction.

    Args:
        elements: elements of the memory that the bucket borrows, as other buckets do in turn.
        shard: [shard_numel] accumulates the reduced gradients of the microbatches, in the dtype the
            optimizer reads.
        memory: full-size memory, in the dtype of the reduction.
        groups: groups of the bucket.
    """

    def __init__(
        self, elements: slice, shard: Tensor, *, memory: GradMemory, groups: ReduceGroups
    ) -> None:
        self.shard = shard
        self.main = shard_of(shard, groups.outer)
        self._elements = elements
        self._memory = memory
        self._groups = groups
        self.is_open = False  # whether memory is borrowed

    def overlaps(self, other: "GradStore") -> bool:
        """Whether the other store borrows elements of the same memory."""
        assert isinstance(other, TransientGrads), "all stores of a buffer are alike"
        start = max(self._elements.start, other._elements.start)
        stop = min(self._elements.stop, other._elements.stop)
        return start < stop

    def full(self) -> Tensor:
        """[numel] memory of unreduced gradients; values that were not written are arbitrary."""
        self.is_open = True
        return self._memory.tensor[self._elements]

    def finish_inside(self, *, is_first: bool) -> None:
        """Copy this rank's slice of the reduced `full` to `shard`; later microbatches add to it."""
        reduced = shard_of(self.full(), self._groups.shard)
        if is_first:
            self.shard.copy_(reduced)
        else:
            self.shard.add_(reduced)
        self.is_open = False

    def shard_to_reduce(self) -> Tensor:
        """[shard_numel]: the gradients to reduce across instances, in the dtype for that."""
        return self.shard.to(self._memory.dtype)

    def finish(self, shard: Tensor) -> None:
        """Copy the reduced gradients to `main`, given `shard_to_reduce` after its reduction."""
        if shard is not self.shard:
            self.main.copy_(shard_of(shard, self._groups.outer))


GradStore = ResidentGrads | TransientGrads


def build_params(
    layout: BufferLayout,
    param_buffer: Tensor,
    *,
    groups: ReduceGroups,
    options: DataParallelOptions,
    update_buffer: Tensor | None = None,
) -> Sequence[ParamStore]:
    """One parameter store per bucket.

    Args:
        layout: layout of the buffers.
        param_buffer: [numel] parameters, or this rank's shard of them where they are sharded.
        groups: groups of the buckets.
        options: strategy, and memory of gathered units.
        update_buffer: elements that this rank updates, in a tensor of their own; None for a part of
            the parameters.
    """
    updates: list[dict[str, Tensor]] = [{} for _ in layout.buckets]
    if update_buffer is not None:
        parts = update_buffer.split([bucket.update_numel for bucket in layout.buckets])
        updates = [{"update": part} for part in parts]
    if not options.strategy.shard_params:
        fulls = param_buffer.split([bucket.numel for bucket in layout.buckets])
        return [
            ParamStore(full, groups=groups, **update)
            for full, update in zip(fulls, updates, strict=True)
        ]
    shards = param_buffer.split([bucket.shard_numel for bucket in layout.buckets])
    sharded = [
        {"groups": groups, "shard": shard, **update}
        for shard, update in zip(shards, updates, strict=True)
    ]
    if options.num_gather_blocks:
        num_blocks = options.num_gather_blocks
        return _build_pooled_params(layout, param_buffer, num_blocks=num_blocks, sharded=sharded)
    stores = []
    for bucket, tensors in zip(layout.buckets, sharded, strict=True):
        # the store frees its memory before the next one takes some
        stores.append(ShardedParams(param_buffer.new_empty(bucket.numel), **tensors))
    return stores


def _build_pooled_params(
    layout: BufferLayout,
    param_buffer: Tensor,
    *,
    num_blocks: int,
    sharded: Sequence[dict[str, Any]],
) -> list[ParamStore]:
    """Parameter stores in `num_blocks` blocks of memory; `sharded` are their other arguments."""
    plan = layout.gather_blocks(num_blocks)
    blocks = {name: param_buffer.new_zeros(numel) for name, numel in plan.numel.items()}
    users: dict[str, set[tuple[str, int]]] = {name: set() for name in blocks}
    stores: list[ParamStore] = []
    for bucket, used, tensors in zip(layout.buckets, plan.buckets, sharded, strict=True):
        full = blocks[used.block][used.start : used.start + bucket.numel]
        unit = min(bucket.units)
        stores.append(PooledParams(full, unit=unit, users=users[used.block], **tensors))
    return stores


def build_grads(
    layout: BufferLayout,
    *,
    groups: ReduceGroups,
    precision: Precision,
    device: torch.device,
    is_transient: bool,
) -> list[GradStore]:
    """One gradient store per bucket.

    Args:
        layout: layout of the buffers.
        groups: groups of the buckets.
        precision: dtypes of unreduced gradients and of gradients that the optimizer reads.
        device: device of the storage.
        is_transient: whether a bucket has full size only from the first write to the reduction.
    """
    if not is_transient:
        buffer = torch.zeros(layout.numel, dtype=precision.grads, device=device)
        fulls = buffer.split([bucket.numel for bucket in layout.buckets])
        return [
            ResidentGrads(full, groups=groups, main_dtype=precision.main_grads) for full in fulls
        ]
    memory = GradMemory(layout.open_numel, device=device, dtype=precision.grads)
    num_elements = layout.numel // groups.shard.size
    buffer = torch.zeros(num_elements, dtype=precision.main_grads, device=device)
    shards = buffer.split([bucket.shard_numel for bucket in layout.buckets])
    stores: list[GradStore] = []
    for bucket, start, shard in zip(layout.buckets, layout.open_starts, shards, strict=True):
        elements = slice(start, start + bucket.numel)
        stores.append(TransientGrads(elements, shard, memory=memory, groups=groups))
    return stores
