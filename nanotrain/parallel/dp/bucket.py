"""A bucket: consecutive parameters of the flat buffers whose gradients are reduced, and which are gathered, together.

A bucket is composed of a parameter store and a gradient store (`stores.py`) and drives the reduction:

    add_grad ...            one gradient per parameter and microbatch
    start_reduce            reduce-scatter inside the shard group
    start_all_reduce        all-reduce of the shard across the replicate group, once per step
    finish_reduce           `grads.shard` holds the sum

With `no_shard` the shard group is one rank and the all-reduce is the whole reduction; with one optimizer instance
the replicate group is one rank and the reduce-scatter is; with several instances (HSDP) both run.
"""

from dataclasses import dataclass

from torch import Tensor

from nanotrain.comm.collectives import start_all_reduce, start_reduce_scatter_into
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.parallel.dp.layout import BucketLayout
from nanotrain.parallel.dp.stores import GradStore, ParamStore, shard_of


@dataclass(frozen=True)
class ReduceGroups:
    """The two groups a gradient is summed over."""

    shard: Group  # the ranks that a bucket is sharded over
    replicate: Group  # the ranks that hold the same shard


class Bucket:
    """One bucket's storage, the gradients it still misses, and its reduction.

    Gradients are copied, not zeroed and added: the first one of a step overwrites the values of the last step.

    Args:
        layout: the bucket's range and its parameters.
        params: storage of the parameters.
        grads: storage of the gradients.
        groups: the shard and replicate groups.
    """

    def __init__(self, layout: BucketLayout, *, params: ParamStore, grads: GradStore, groups: ReduceGroups) -> None:
        self.layout, self.params, self.grads = layout, params, grads
        self._groups = groups
        self._ranges = {
            entry.name: slice(entry.start - layout.start, entry.stop - layout.start) for entry in layout.params
        }
        self._gaps = _gaps(layout)
        self._written: set[str] = set()
        self._missing: set[str] = set()
        self._reduce_scatter: Work[Tensor] | None = None
        self._all_reduce: Work[Tensor] | None = None
        self._is_first, self._awaits_all_reduce = True, False

    @property
    def is_in_flight(self) -> bool:
        """Whether a reduction was started and not yet finished."""
        return self._reduce_scatter is not None or self._awaits_all_reduce or self._all_reduce is not None

    @property
    def is_ready(self) -> bool:
        """Whether every gradient of the current backward pass was added."""
        return not self._missing

    def view(self, name: str, full: Tensor) -> Tensor:
        """The elements of one parameter in a flat tensor of the bucket's size."""
        return full[self._ranges[name]]

    def begin_step(self) -> None:
        """Discard the gradients of the last step."""
        self._written.clear()
        self._is_first = True

    def begin_backward(self) -> None:
        """Expect the gradient of every parameter."""
        self._missing = set(self._ranges)

    def add_grad(self, name: str, grad: Tensor) -> None:
        """Add one parameter's gradient of one microbatch."""
        target = self.view(name, self.grads.full()).view_as(grad)
        if name in self._written:
            target.add_(grad)
        else:
            target.copy_(grad)
            self._written.add(name)
        self._missing.discard(name)

    def start_reduce(self, *, is_last: bool) -> None:
        """Start the reduce-scatter inside the shard group.

        Args:
            is_last: whether no other reduction of this bucket follows in the step.
        """
        full, self._awaits_all_reduce = self.grads.full(), is_last
        self._zero_unwritten(full)
        group = self._groups.shard
        self._reduce_scatter = start_reduce_scatter_into(shard_of(full, group), full, group=group)
        if group.size == 1:
            self.start_all_reduce()  # nothing to wait for, so it can overlap the backward pass

    def finish_reduce_scatter(self) -> None:
        """Wait until `grads.shard` holds the sum inside the shard group; a transient store is then empty."""
        work, self._reduce_scatter = self._reduce_scatter, None
        if work is not None:
            work.wait()
            self.grads.finish_reduce_scatter(is_first=self._is_first)
            self._is_first = False
            self._written.clear()

    def start_all_reduce(self) -> None:
        """Finish the reduce-scatter and, after the last one of a step, start the all-reduce across replicas."""
        self.finish_reduce_scatter()
        if self._awaits_all_reduce:
            self._awaits_all_reduce = False
            self._all_reduce = start_all_reduce(self.grads.shard, self._groups.replicate)

    def finish_reduce(self) -> None:
        """Wait until `grads.shard` holds the sum."""
        self.start_all_reduce()
        work, self._all_reduce = self._all_reduce, None
        if work is not None:
            work.wait()

    def _zero_unwritten(self, full: Tensor) -> None:
        """Zero gaps, padding and parameters without a gradient, which hold arbitrary values."""
        for name in self._ranges.keys() - self._written:
            self.view(name, full).zero_()
        for gap in self._gaps:
            full[gap].zero_()


def _gaps(layout: BucketLayout) -> tuple[slice, ...]:
    """The elements of the bucket that belong to no parameter."""
    edges = [layout.start, *(edge for entry in layout.params for edge in (entry.start, entry.stop)), layout.stop]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple(slice(start - layout.start, stop - layout.start) for start, stop in gaps if start < stop)
