"""FSDP units: modules that run in turn, and the all-gather of their parameters (ZeRO-3).

child_units    the children of a pipeline stage
given_units    modules named by the caller, of any model
traced_units   the units whose compiled graphs write weight gradients
GatherOrder    which buckets are all-gathered and freed when, by index, for the plan and the run
UnitGather     hooks that carry out a `GatherOrder`

    before the forward of unit i     all-gather i, start the next ones, free all others
    after it                         free i, unless it returns a loss, whose backward is next
    before the backward of unit i    all-gather i, start the previous ones, free all others
    before unit i is run again       all-gather i; keep what the running backward has gathered
    after the last                   free all

The backward of an embedding reads no parameters, so it is not gathered for it. Final norm and head
are one unit.

Only the parameters of the current unit and of those gathered ahead have storage. Weight gradients
that are computed later (W of a zero-bubble schedule) read no parameters. Without resharding after
the forward a unit is kept until the backwards of all microbatches that ran forward are complete,
and the backward gathers nothing.

A backward that recomputes a group of layers first runs the group forward. Besides the running layer
only the layer whose backward waits, and the units that it has gathered ahead, stay gathered:

    group 1 2 3    backward 3: gather 3
                       forward 1: gather 1 | forward 2: gather 2, free 1 | forward 3
                   backward 2: gather 2, if it was not kept as the one ahead
                   backward 1: gather 1

Source: Zhao et al. 2023 (PyTorch FSDP), sections 3.2 and 3.3.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Self

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.parallel.dp.options import DataParallelOptions
from nanotrain.parallel.dp.stores import ParamStore


@dataclass(frozen=True)
class GatherChange:
    """The buckets to free, then the buckets whose all-gathers start, by index."""

    freed: tuple[int, ...]
    started: tuple[int, ...] = ()  # in the order of the all-gathers


class GatherOrder:
    """The gathered buckets of one buffer, while its units run one after another.

    Args:
        units: the buckets that each unit reads, in forward order; two units may read the same
            bucket.
        num_prefetched: units gathered ahead.
        reshards: free a unit after its forward and gather it again for its backward.
        blocks: for each bucket, the block of memory that it shares with others; empty where each
            has its own.
        lookups: units whose backward reads no parameters.
    """

    def __init__(
        self,
        units: Iterable[Sequence[int]],
        *,
        num_prefetched: int,
        reshards: bool = True,
        blocks: Sequence[str] = (),
        lookups: Collection[int] = (),
    ) -> None:
        self.units = [tuple(unit) for unit in units]
        self._read_backward = list(self.units)
        for index in lookups:
            self._read_backward[index] = ()
        self._num_next = num_prefetched
        self._reshards = reshards
        self._blocks = dict(enumerate(blocks))
        # the last unit, from a forward that returns a loss to its backward
        self._kept: tuple[int, ...] = ()
        self._gathered: dict[int, None] = {}  # in the order in which they were gathered
        # number of backwards that are still to read the bucket, by bucket
        self._num_backwards: Counter[int] = Counter()
        self._last_backward = 0  # the unit whose backward began last
        self._keeps_all = False  # between `gather_all` and `free_all`

    @classmethod
    def of(
        cls,
        units: Iterable[Sequence[int]],
        layout: BufferLayout,
        *,
        options: DataParallelOptions,
        lookups: Collection[int] = (),
    ) -> Self:
        """The units of a buffer; arguments as the constructor, with the rest from `options`."""
        blocks: list[str] = []
        if options.num_gather_blocks:
            plan = layout.gather_blocks(options.num_gather_blocks)
            blocks = [used.block for used in plan.buckets]
        return cls(
            units,
            num_prefetched=options.num_prefetched_units,
            reshards=options.reshards_after_forward,
            blocks=blocks,
            lookups=lookups,
        )

    def begin_step(self) -> GatherChange:
        """Expect no backward of an earlier step."""
        self._num_backwards.clear()
        self._kept = ()
        return self.free()

    def gather_all(self) -> tuple[int, ...]:
        """Keep every bucket gathered until `free_all`; returns all of them."""
        self._keeps_all = True
        self._gathered |= dict.fromkeys(chain.from_iterable(self.units))
        return tuple(self._gathered)

    def free_all(self) -> GatherChange:
        """Free the buckets that `gather_all` gathered."""
        self._keeps_all = False
        self._kept = ()
        return self.free()

    def free(self, *, but: Collection[int] = ()) -> GatherChange:
        """Free all buckets except `but` and buckets that still wait for a backward."""
        if self._keeps_all:
            return GatherChange(())
        kept = (*but, *self._kept)
        freed = []
        for bucket in self._gathered:
            if bucket not in kept and not self._num_backwards[bucket]:
                freed.append(bucket)
        for bucket in freed:
            del self._gathered[bucket]
        return GatherChange(tuple(freed))

    def before_forward(self, index: int) -> GatherChange:
        """Gather a unit for its forward."""
        self._kept = ()
        return self._gather(self._buckets_of(range(index, index + 1 + self._num_next)))

    def after_forward(
        self, index: int, *, has_backward: bool, is_loss: bool = False
    ) -> GatherChange:
        """Free a unit after its forward, unless it stays gathered for its backward."""
        if has_backward and not self._reshards:
            self._num_backwards.update(self._read_backward[index])
        if has_backward and is_loss and index == len(self.units) - 1:
            self._kept = self._read_backward[index]
        return self.free(but=self._buckets_of(range(index + 1, index + 1 + self._num_next)))

    def before_backward(self, index: int) -> GatherChange:
        """Gather a unit for its backward."""
        self._last_backward = index
        self._kept = ()
        if not self._reshards:
            self._num_backwards.subtract(self._read_backward[index])
        buckets = self._read_backward[index]
        ahead = self._read_backward[max(0, index - self._num_next) : index]
        return self._gather([*buckets, *chain.from_iterable(ahead)])

    def before_recomputation(self, index: int) -> GatherChange:
        """Gather a unit that runs again inside a backward."""
        last = self._last_backward
        current = self.units[index]
        num_ahead = self._num_next if index == last else 0
        # A unit that shares its block with the current one is recomputed later, and gathered then.
        memory_in_use = {self._memory_of(bucket) for bucket in current}
        ahead = self._buckets_of(range(last - num_ahead, last + 1))
        kept = [bucket for bucket in ahead if self._memory_of(bucket) not in memory_in_use]
        return self._gather(current, kept=kept)

    def _gather(self, wanted: Sequence[int], *, kept: Sequence[int] = ()) -> GatherChange:
        """Gather buckets, and free all others but the kept ones."""
        freed = self.free(but=(*wanted, *kept)).freed
        missing = [bucket for bucket in wanted if bucket not in self._gathered]
        started = tuple(dict.fromkeys(missing))
        self._gathered |= dict.fromkeys(started)
        return GatherChange(freed, started)

    def _memory_of(self, bucket: int) -> str | int:
        """Key of the memory of a bucket; buckets with equal keys share it."""
        return self._blocks.get(bucket, bucket)

    def _buckets_of(self, indices: range) -> list[int]:
        """The buckets of the units with these indices; absent units are ignored."""
        units = [self.units[index] for index in indices if 0 <= index < len(self.units)]
        return list(chain.from_iterable(units))


@dataclass(frozen=True)
class UnitModules:
    """Modules that run one after another, and the buckets of their parameters."""

    first: nn.Module
    last: nn.Module
    buckets: tuple[int, ...]  # indices of the buckets that they read
    # when their backward begins, the gradients of the first `num_complete` buckets are complete
    num_complete: int
    is_lookup: bool = False  # the backward reads no parameters


def child_units(module: nn.Module, layout: BufferLayout) -> list[UnitModules]:
    """The children of a stage in registration order; successive ones with the same unit are one."""
    # read by the head of a tied model and by layers of multi-token prediction
    shared = [i for i, bucket in enumerate(layout.buckets) if bucket.is_shared]
    units: dict[str, UnitModules] = {}
    for name, child in unit_modules(module):
        specs = [local.spec for local in layout.params if local.spec.name.startswith(f"{name}.")]
        if specs and all(spec.is_last_stage_replica for spec in specs):
            continue  # only the head and multi-token prediction read it
        unit = specs[0].unit if specs else name
        unit_buckets = [i for i, bucket in enumerate(layout.buckets) if unit in bucket.units]
        read = tuple(unit_buckets)
        if getattr(child, "reads_shared", False):
            read = tuple(dict.fromkeys(unit_buckets + shared))
        if not read:
            continue
        if unit in units:
            units[unit] = replace(units[unit], last=child, buckets=read)
        else:
            num_complete = unit_buckets[0] if specs else 0
            is_lookup = getattr(child, "is_lookup", False)
            units[unit] = UnitModules(child, child, read, num_complete, is_lookup)
    return list(units.values())


def given_units(
    units: Sequence[tuple[nn.Module, Collection[str]]], layout: BufferLayout
) -> list[UnitModules]:
    """Modules in forward order with the names of the parameters that each reads.

    The order of their backwards is unknown, so no gradient counts as complete before the backward
    ends.
    """
    given = []
    for module, names in units:
        read = []
        for index, bucket in enumerate(layout.buckets):
            if not bucket.names.isdisjoint(names):
                read.append(index)
        given.append(UnitModules(module, module, tuple(read), num_complete=0))
    return given


def unit_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module that run in turn, with the items of lists and dicts of modules."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            for key, item in child.named_children():
                yield f"{name}.{key}", item
        else:
            yield name, child


def traced_units(layout: BufferLayout, *, is_transient: bool, num_blocks: int) -> set[str]:
    """FSDP units whose compiled graphs write weight gradients into the bucket.

    Hooks run after the backward of a graph. Where buckets borrow storage, those of a unit would all
    borrow at once, and the first one would wait for a reduction that the backward of the graph can
    hide.

    Args:
        layout: layout of the buffer.
        is_transient: whether buckets borrow storage.
        num_blocks: blocks of memory that gathered units use in turn. A weight that a graph has
            saved is then in the same memory as those of other units, which does not identify it.
    """
    if num_blocks:
        return set()
    if is_transient:
        return layout.units_in_one_bucket
    return {param.spec.unit for param in layout.params}


class UnitGather:
    """Hooks of the units of one module, which run one after another.

    Args:
        units: units in forward order.
        stores: parameter stores of all buckets.
        order: order of the buckets that these units read.
        before_backward: called with the index of a unit when the backward of all later units is
            complete.
        is_recomputing: whether a forward pass is one that a backward runs again.
    """

    def __init__(
        self,
        units: Sequence[UnitModules],
        stores: Sequence[ParamStore],
        *,
        order: GatherOrder,
        before_backward: Callable[[int], None],
        is_recomputing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stores = stores
        self._order = order
        self._notify = before_backward
        self._is_recomputing = is_recomputing
        for index, unit in enumerate(units):
            unit.first.register_forward_pre_hook(partial(self._before_forward, index))
            unit.last.register_forward_hook(partial(self._after_forward, index))

    def begin_step(self) -> None:
        """Expect no backward of an earlier step."""
        self._carry_out(self._order.begin_step())

    def free(self) -> None:
        """Free the storage of all units that no backward waits for."""
        self._carry_out(self._order.free())

    @contextmanager
    def all_gathered(self) -> Iterator[None]:
        """Gather all units inside the block; forward passes inside it communicate nothing."""
        for bucket in self._order.gather_all():
            self._stores[bucket].gather_apart()
        try:
            yield
        finally:
            self._carry_out(self._order.free_all())

    def _before_forward(self, index: int, *_: Any) -> None:
        if self._is_recomputing():
            change = self._order.before_recomputation(index)
        else:
            change = self._order.before_forward(index)
        self._gather(index, change)

    def _after_forward(self, index: int, *hook_arguments: Any) -> None:
        """Forward hook of a unit: free or prefetch parameters, and hook the backward to outputs."""
        if self._is_recomputing():
            # the next forward or backward frees the unit; hooks of this output would never be
            # called
            return
        leaves = tree_leaves(hook_arguments[-1])
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        has_backward = bool(outputs)
        is_loss = any(output.ndim == 0 for output in outputs)
        change = self._order.after_forward(index, has_backward=has_backward, is_loss=is_loss)
        self._carry_out(change)
        if len(outputs) == 1:
            outputs[0].register_hook(partial(self._before_backward, index))
        elif outputs:  # the backward begins with the first gradient of any output
            register_multi_grad_hook(outputs, partial(self._before_backward, index), mode="any")

    def _before_backward(self, index: int, _grad: Tensor) -> None:
        self._notify(index)
        self._gather(index, self._order.before_backward(index))

    def _gather(self, index: int, change: GatherChange) -> None:
        self._carry_out(change)
        for bucket in self._order.units[index]:
            self._stores[bucket].wait()

    def _carry_out(self, change: GatherChange) -> None:
        for bucket in change.freed:
            self._stores[bucket].free()
        for bucket in change.started:
            self._stores[bucket].start_all_gather()
