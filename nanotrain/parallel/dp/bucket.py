"""A bucket: consecutive parameters of the flat buffers that are reduced and gathered together.

`ParamBucket` has a parameter store (`stores.py`). `Bucket` has a gradient store too, and drives a
`Reduction`:

    add_grad ...            one gradient per parameter and microbatch, or
    start_write ...         a product writes it; mark_ready follows the last use of the parameter
    start_reduce            inside the shard group
    start_across            across optimizer instances, once per step
    finish_reduce           `grads.main` holds the sum
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import start_reduce_scatter_by_all_to_all
from nanotrain.comm.collectives import start_all_reduce, start_reduce_scatter_into
from nanotrain.comm.work import Work
from nanotrain.parallel.dp.layout import BucketLayout
from nanotrain.parallel.dp.options import DataParallelOptions, ReduceGroups
from nanotrain.parallel.dp.stores import GradStore, ParamStore, shard_of


class Reduction:
    """The collectives that reduce the gradients of one buffer.

        inside an instance     reduce-scatter over `shard`, after every microbatch or the last one
        across instances       all-reduce of the shard over `replicate`, once per step, or a
                               reduce-scatter where optimizer state is sharded across instances

    With `no_shard` the shard group is one rank, so only the all-reduce across instances
    communicates. With one optimizer instance the replicate group is one rank, so only the
    reduce-scatter does. With several instances (HSDP) both do.
    """

    def __init__(self, groups: ReduceGroups, options: DataParallelOptions) -> None:
        self.groups = groups
        self.keeps_full = options.keeps_full_grads
        self._scale = options.grad_scale
        self._op = "avg" if options.averages else "sum"
        self._reduce_scatter = start_reduce_scatter_into
        if options.by_all_to_all:
            self._reduce_scatter = start_reduce_scatter_by_all_to_all

    def start_inside(self, full: Tensor) -> Work[Tensor]:
        """Start a reduce-scatter of `full` [numel] over the ranks of the optimizer instance."""
        if self._scale != 1.0:
            full.mul_(self._scale)
        if self.keeps_full:
            return start_all_reduce(full, self.groups.shard, op=self._op)
        shard = shard_of(full, self.groups.shard)
        return self._reduce_scatter(shard, full, group=self.groups.shard, op=self._op)

    def start_across(self, shard: Tensor) -> Work[Tensor]:
        """Start to sum `shard` across instances, in place; the result is `shard`.

        Where it is sharded across instances, only this rank's slice of it holds the sum.
        """
        replicate = self.groups.replicate
        if not self.groups.shards_across or self.keeps_full:
            return start_all_reduce(shard, replicate, op=self._op)
        work = self._reduce_scatter(shard_of(shard, replicate), shard, group=replicate, op=self._op)
        return work.then(lambda _: shard)


class ParamBucket:
    """One bucket of parameters, without gradients.

    Args:
        layout: the bucket's range and its parameters.
        params: storage of the parameters.
        groups: the groups that the bucket is sharded and replicated over.
    """

    def __init__(self, layout: BucketLayout, *, params: ParamStore, groups: ReduceGroups) -> None:
        self.layout = layout
        self.params = params
        # the param ranges that this rank's optimizer updates or loads, in `params.update`
        self.update_ranges = layout.update_ranges(
            groups.shard.index, outer_index=groups.outer.index
        )
        self._ranges: dict[str, slice] = {}  # elements of each parameter in the bucket
        for entry in layout.params:
            self._ranges[entry.name] = slice(entry.start - layout.start, entry.stop - layout.start)

    def view(self, name: str, full: Tensor) -> Tensor:
        """The elements of one parameter in a flat tensor of the bucket's size."""
        return full[self._ranges[name]]


class Bucket(ParamBucket):
    """One bucket: its storage, the parameters whose gradients are still missing, and its reduction.

    Gradients are not zeroed between steps: the first gradient of a step overwrites the values of
    the last step. `update_ranges` are ranges of the params and of `grads.main` alike.

    Args:
        layout: the bucket's range and its parameters.
        params: storage of the parameters.
        grads: storage of the gradients.
        reduction: the collectives.
    """

    def __init__(
        self, layout: BucketLayout, *, params: ParamStore, grads: GradStore, reduction: Reduction
    ) -> None:
        super().__init__(layout, params=params, groups=reduction.groups)
        self.grads = grads
        self._reduction = reduction
        self._gaps = _gaps(layout)
        self._written: set[str] = set()
        self._ahead: set[str] = set()  # parameters whose gradient a forward pass has written
        self._early: dict[str, Tensor] = {}  # gradients that are kept until the bucket has memory
        self._missing: set[str] = set()
        self._inside: Work[Tensor] | None = None
        self._across: Work[Tensor] | None = None
        self._is_first = True  # whether no reduction of the step is complete
        self._awaits_across = False  # whether the reduction across instances is still to start
        # called after each backward, before its gradients are reduced
        self.observer: Callable[[Bucket], None] | None = None

    @property
    def is_in_flight(self) -> bool:
        """Whether a reduction was started and not yet finished."""
        return self._inside is not None or self._awaits_across or self._across is not None

    @property
    def is_ready(self) -> bool:
        """Whether every gradient of the current backward pass was added."""
        return not self._missing

    def begin_step(self) -> None:
        """Discard the gradients of the last step."""
        self._written.clear()
        self._ahead.clear()
        self._early.clear()
        self._is_first = True

    def begin_backward(self) -> None:
        """Expect the gradient of every parameter that is not written yet."""
        self._missing = self._ranges.keys() - self._ahead

    def add_grad(self, name: str, grad: Tensor) -> None:
        """Add one parameter's gradient of one microbatch."""
        self._add(name, grad)
        self.mark_ready(name)

    def keep_grad(self, name: str, grad: Tensor) -> None:
        """Keep one parameter's gradient of one microbatch until the bucket has memory."""
        early = self._early.get(name)
        self._early[name] = grad if early is None else early.add_(grad)
        self.mark_ready(name)

    def _add(self, name: str, grad: Tensor) -> None:
        """Write a gradient to the buffer; add it if the parameter has one of this step."""
        target = self.view(name, self.grads.full()).view_as(grad)
        if name in self._written:
            target.add_(grad)
        else:
            target.copy_(grad)
            self._written.add(name)

    def expect_ahead(self, name: str) -> None:
        """Expect the gradient of one parameter in the forward passes of this step only."""
        self._ahead.add(name)

    def start_write(self, name: str) -> tuple[Tensor, bool]:
        """The gradient elements of one parameter, and whether to add to them or overwrite."""
        has_grads = name in self._written
        self._written.add(name)
        return self.view(name, self.grads.full()), has_grads

    def start_keep(
        self, name: str, *, shape: torch.Size, dtype: torch.dtype
    ) -> tuple[Tensor, bool]:
        """Like `start_write`, but into a private buffer that `keep_grad` accumulates into."""
        has_grads = name in self._early
        if not has_grads:
            self._early[name] = self.grads.shard.new_empty(shape, dtype=dtype)
        return self._early[name], has_grads

    def mark_ready(self, name: str) -> None:
        """Mark one parameter's gradient of this backward as complete."""
        self._missing.discard(name)

    def start_reduce(self, *, is_last: bool) -> None:
        """Start the reduction inside the shard group.

        Args:
            is_last: whether no other reduction of this bucket follows in the step.
        """
        full = self.grads.full()
        self._awaits_across = is_last
        for name, grad in self._early.items():
            self._add(name, grad)
        self._early.clear()
        self._zero_unwritten(full)
        self.observe()
        self._inside = self._reduction.start_inside(full)
        if self._reduction.groups.shard.size == 1:
            self.start_across()  # nothing to wait for, so it can overlap the backward pass

    def observe(self) -> None:
        """Pass the gradients so far to the observer, if there is one."""
        if self.observer is not None:
            self.observer(self)

    def written_grads(self, *, with_ahead: bool = True) -> dict[str, Tensor]:
        """The gradients of the parameters that have one in this step, before a reduction.

        Args:
            with_ahead: include gradients that forward passes have written, ahead of the backward.
        """
        full = self.grads.full()
        names = self._written if with_ahead else self._written - self._ahead
        return {name: self.view(name, full) for name in names}

    def finish_inside(self) -> None:
        """Wait until `grads.shard` holds the sum inside the shard group."""
        if self._inside is None:
            return
        self._inside.wait()
        self._inside = None
        self.grads.finish_inside(is_first=self._is_first)
        self._is_first = False
        self._written.clear()

    def start_across(self) -> None:
        """Finish the reduction in the instance; after the last one reduce across instances."""
        self.finish_inside()
        if not self._awaits_across:
            return
        self._awaits_across = False
        if self._reduction.groups.replicate.size == 1:
            tensor = self.grads.shard  # not rounded to the dtype of a reduction
        elif self._reduction.keeps_full:
            tensor = self.grads.full()
        else:
            tensor = self.grads.shard_to_reduce()
        self._across = self._reduction.start_across(tensor)

    def finish_reduce(self) -> None:
        """Wait until `grads.main` holds the sum."""
        self.start_across()
        if self._across is not None:
            self.grads.finish(self._across.wait())
            self._across = None

    def _zero_unwritten(self, full: Tensor) -> None:
        """Zero gaps, padding and parameters without a gradient, which hold arbitrary values."""
        for name in self._ranges.keys() - self._written:
            self.view(name, full).zero_()
        for gap in self._gaps:
            full[gap].zero_()


def _gaps(layout: BucketLayout) -> tuple[slice, ...]:
    """The elements of the bucket that belong to no parameter."""
    starts = [layout.start, *(entry.stop for entry in layout.params)]
    stops = [*(entry.start for entry in layout.params), layout.stop]
    gaps = []
    for start, stop in zip(starts, stops, strict=True):
        if start < stop:
            gaps.append(slice(start - layout.start, stop - layout.start))
    return tuple(gaps)
