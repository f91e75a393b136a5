"""Recorder of one rank: its collectives, the bytes that it allocates, and law L9 (happens-before).

    Recorder      compares operators with the operations in flight, counts storages on meta
    Call          a collective, a send or a receive
    Race          a buffer was used between the start of an operation and the wait for it

Buffers are storages and byte ranges, not addresses, so tensors on the meta device are checked as
any others. Races:

    read of an output in flight                     a wait is missing before the use
    write to an input or an output in flight        a wait is missing before the reuse
    storage freed or resized while in flight        nothing kept the buffer alive

The assumptions are the weakest: every message has a handle of its own, and nothing is ordered by
the stream of a communicator.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nanotrain.quantities import round_up

BLOCK_BYTES = 512  # torch's allocator on GPUs rounds every size up to a multiple of this
_PACKAGE = f"{Path(__file__).parents[1]}/"
_SEQUENCES = (list, tuple)
_HIDDEN = tuple(f"{_PACKAGE}{folder}/" for folder in ("comm", "planner", "prove"))
# Operators that take a tensor for its shape, dtype or storage and touch no memory of it.
_METADATA_ONLY = {
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "new_zeros",
    "new_ones",
    "new_full",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "_unsafe_view",
    "set_",
    "is_same_size",
    "resize_",
    "record_stream",
    "lift_fresh",
}


class Race(AssertionError):
    """A buffer was used while an operation in flight may read or write it."""


class Call(NamedTuple):
    """An operation that this rank started over a process group."""

    ranks: tuple[int, ...]  # ranks of the group
    op: str
    size: str  # elements and dtype, on which all members agree, and both sides of a message
    num_bytes: int
    place: str  # the lines of nanotrain that started it
    moment: int | str  # number of the schedule's action, or the phase of the step
    peer: int | None = None  # index in the group of the other side of a message
    # all-to-all: rows sent to each member, and received
    splits: tuple[tuple[int, ...], ...] = ()


class _Buffer(NamedTuple):
    """Bytes of one tensor, without keeping its storage alive."""

    storage: int
    start: int
    stop: int

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        start = int(tensor.storage_offset()) * tensor.itemsize
        numel = 0  # from the first element to the last one
        if tensor.numel():
            numel = 1
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                numel += (size - 1) * stride
        return cls(tensor.untyped_storage()._cdata, start, start + numel * tensor.itemsize)


@dataclass(eq=False)
class InFlight:
    """An operation that was started and not yet waited for."""

    op: str
    started_at: str
    inputs: list[_Buffer]
    outputs: list[_Buffer]
    # tensors that the allocator would keep (`record_stream`), and weak references to storages
    kept: tuple[Any, ...] = ()
    storages: frozenset[int] = frozenset()  # storages of all buffers
    ends_on_host: bool = False  # a copy whose host side is not waited for by the device
    is_lost: bool = False  # a storage was freed or resized

    def lose(self, _: Any = None) -> None:
        """Note that a storage was freed or resized."""
        self.is_lost = True

    def __str__(self) -> str:
        return f"{self.op} started at {self.started_at}"


class Recorder(TorchDispatchMode):
    """Checks operators against the operations in flight, and counts allocations on meta.

    Args:
        shapes: results of operators on the meta device, by what their arguments look like; may be
            shared.

    Attributes:
        calls: operations over process groups, in the order in which they were started.
        moment: number of the schedule's action that the rank runs, or the phase of the step.
        num_operators: operators that were compared with at least one buffer in flight.
        allocated, peak: bytes of the storages on the meta device, in blocks of a GPU's allocator.
        in_flight: the operations in flight, oldest first.
    """

    def __init__(self, shapes: dict[Any, Any] | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.moment: int | str = "start"
        self.num_operators = 0
        self.allocated = 0
        self.peak = 0
        self.in_flight: list[InFlight] = []
        self._shapes = {} if shapes is None else shapes
        # weak reference and counted bytes, by storage
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._resizes: list[Any] = []  # one per `with` block, which may be nested

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else torch imports its compiler, which takes seconds, and calls it each time."""
        return False

    def __enter__(self) -> Self:
        self._resizes.append(patch.object(torch.UntypedStorage, "resize_", self._resize()))
        self._resizes[-1].start()
        entered: Self = super().__enter__()
        return entered

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizes.pop().stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator after checking it against the operations in flight, and count memory."""
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        operands = tensors_of((*args, *kwargs.values()))
        if self.in_flight and func.overloadpacket.__name__ not in _METADATA_ONLY:
            self.num_operators += 1
            if self._are_in_flight(operands):
                written = written_tensors(func, args, kwargs=kwargs)
                written_ids = set(map(id, written))
                read = [tensor for tensor in operands if id(tensor) not in written_ids]
                self.check(func._schema.name, reads=read, writes=written)
        result = self._run(func, args, kwargs=kwargs, inputs=operands)
        for tensor in tensors_of((result,)):
            if tensor.is_meta:
                self._count(tensor.untyped_storage())
        return result

    def observe(self, name: str, level: int) -> None:
        """Note that a phase (level 1) or an action of the schedule (level 2) begins.

        It is called as `Heartbeat.observer`.
        """
        if level == 1:
            self.moment = name
        elif isinstance(self.moment, int):
            self.moment += 1
        else:
            self.moment = 0

    def add_call(self, call: Call, *, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Note an operation over a process group, which has just been started.

        Args:
            call: the operation.
            inputs, outputs: its tensors, whole; an all-reduce is in place.
        """
        self.calls.append(call)

    def check(
        self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Raise `Race` if these accesses conflict with an operation in flight."""
        self._check_storages(what)
        for operation in self.in_flight:
            if _overlaps_any(reads, operation.outputs):
                does = "reads an output"
            elif _overlaps_any(writes, operation.outputs):
                does = "writes to an output"
            elif _overlaps_any(writes, operation.inputs):
                does = "writes to an input"
            else:
                continue
            raise Race(f"{what} at {place()} {does} in flight: {operation}")

    def start(
        self,
        op: str,
        *,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        keeps: bool = False,
    ) -> InFlight:
        """Note that an operation on these buffers is in flight, and check it against others."""
        self.check(op, reads=inputs, writes=outputs)
        tensors = (*inputs, *outputs)
        operation = InFlight(op, place(), [*map(_Buffer.of, inputs)], [*map(_Buffer.of, outputs)])
        storages = [tensor.untyped_storage() for tensor in tensors]
        operation.storages = frozenset(storage._cdata for storage in storages)
        references = tuple(weakref.ref(storage, operation.lose) for storage in storages)
        operation.kept = tensors + references if keeps else references
        self.in_flight.append(operation)
        return operation

    def complete(self, operation: InFlight) -> None:
        """Note that an operation was waited for."""
        if operation in self.in_flight:
            self._check_storages(f"the wait for {operation.op}")
            self.in_flight.remove(operation)

    def finish(self) -> None:
        """Raise `Race` if an operation was never waited for."""
        self._check_storages("the end of the run")
        unwaited = [entry for entry in self.in_flight if not entry.ends_on_host]
        if unwaited:
            raise Race(f"never waited for: {'; '.join(map(str, unwaited))}")

    def _are_in_flight(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors share storage with an operation in flight, or such storage is lost."""
        used = {tensor.untyped_storage()._cdata for tensor in tensors}
        return any(
            operation.is_lost or not used.isdisjoint(operation.storages)
            for operation in self.in_flight
        )

    def _check_storages(self, what: str) -> None:
        lost = next((operation for operation in self.in_flight if operation.is_lost), None)
        if lost is not None:
            raise Race(f"before {what} at {place()} storage was freed or resized in flight: {lost}")

    def _run(self, func: Any, args: Any, *, kwargs: Mapping[str, Any], inputs: list[Tensor]) -> Any:
        """Run an operator; results on meta are made as in an earlier run with equal shapes.

        Half of torch's operators compute shapes on the meta device in Python, in up to 1 ms.
        """
        # such as set_, which changes what its input looks like
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        key = func, _shapes(args), _shapes(tuple(kwargs.items()))
        makers = self._shapes.get(key)
        if makers is not None:
            made = [make(inputs) for make in makers]
            return made[0] if len(made) == 1 else tuple(made)
        result = func(*args, **kwargs)
        if all(tensor.is_meta for tensor in inputs):
            results = result if isinstance(result, tuple) else (result,)
            makers = [_result_maker(value, inputs) for value in results]
            if None not in makers:
                self._shapes[key] = makers
        return result

    def _resize(self) -> Any:
        """`torch.UntypedStorage.resize_` that also marks operations in flight as lost."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            """Resize as torch does, and note which operations lose their memory."""
            for operation in self.in_flight:
                operation.is_lost |= storage._cdata in operation.storages
            resized = original(storage, size)
            if storage.device.type == "meta":
                self._count(storage)
            return resized

        return resize_

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage in its present size."""
        key = storage._cdata
        size = round_up(storage.nbytes(), BLOCK_BYTES)
        if key in self._sizes:
            reference, before = self._sizes[key]
        else:
            reference = weakref.ref(storage, partial(self._forget, key))
            before = 0
        self._sizes[key] = reference, size
        self.allocated += size - before
        self.peak = max(self.peak, self.allocated)

    def _forget(self, key: int, _: Any) -> None:
        self.allocated -= self._sizes.pop(key)[1]


@contextmanager
def unrecorded() -> Iterator[None]:
    """Run operators of the dry run itself, which a real rank does not run, without a record."""
    with _disable_current_modes(), torch.no_grad():
        yield


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Positions and names of the arguments that an operator writes to."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append((position, argument.name))
    return written


def written_tensors(func: Any, args: Sequence[Any], *, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that an operator writes to."""
    values = []
    for position, name in _written_arguments(func):
        values.append(args[position] if position < len(args) else kwargs.get(name))
    return tensors_of(values)


def tensors_of(values: Sequence[Any]) -> list[Tensor]:
    """All tensors in nested sequences."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, _SEQUENCES):
            tensors += tensors_of(value)
    return tensors


def _shapes(values: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of an operator as a key."""
    key: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            key.append((value.shape, value.stride(), value.dtype, value.is_meta))
        elif isinstance(value, _SEQUENCES):
            key.append(_shapes(value))
        else:
            key.append((type(value), value))
    return tuple(key)


def _result_maker(result: Any, inputs: list[Tensor]) -> Callable[[list[Tensor]], Any] | None:
    """A function that makes a result like this one from other inputs of the same shapes.

    Results are None, an input, or a new meta tensor. There is no function for any other, such as a
    view of an input.
    """
    if result is None:
        return lambda inputs: None
    for position, tensor in enumerate(inputs):
        if result is tensor:
            return itemgetter(position)
    if not isinstance(result, Tensor) or not result.is_meta:
        return None
    storage = result.untyped_storage()._cdata
    if any(storage == tensor.untyped_storage()._cdata for tensor in inputs):
        return None
    shape = result.shape
    stride = result.stride()
    dtype = result.dtype
    return lambda inputs: torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _overlaps_any(tensors: Sequence[Tensor], buffers: Sequence[_Buffer]) -> bool:
    """Whether any of the tensors overlaps any of the buffers."""
    return any(_overlap(tensor, buffer) for tensor in tensors for buffer in buffers)


def _overlap(tensor: Tensor, buffer: _Buffer) -> bool:
    """Whether a tensor has elements in a buffer, which is contiguous."""
    used = _Buffer.of(tensor)
    if used.storage != buffer.storage or not max(used.start, buffer.start) < min(
        used.stop, buffer.stop
    ):
        return False
    if tensor.is_contiguous():
        return True
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(size if stride else 1) * stride).reshape(-1)
    starts = used.start + offsets * tensor.itemsize
    return bool(((starts + tensor.itemsize > buffer.start) & (starts < buffer.stop)).any())


def place() -> str:
    """The source location for messages: the innermost running functions of other packages."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < 3:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE) and not code.co_filename.startswith(_HIDDEN):
            lines.append(f"{code.co_filename[len(_PACKAGE) :]}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " <- ".join(lines) or "the test"
