"""Recorder of law L9 (happens-before): no buffer is touched between the start of an operation and the wait for it.

    with recorded_world(topology, rank) as (context, recorder):
        ...                          # build and train as on this rank of the world
        recorder.finish()            # every operation that was started was waited for

One process is one rank of a world of any size. Collectives send nothing: they write plausible values and stay in flight
until their handle is waited for. A dispatch mode compares the bytes that every operator reads and writes with the
buffers in flight. Errors (`Race`):

    read of an output in flight                     a wait is missing before the use
    write to an input or an output in flight        a wait is missing before the reuse
    storage freed or resized while in flight        nothing kept the buffer alive

Values of other ranks are made up, so only the order of events is checked here, on the weakest assumptions: every
message has a handle of its own, and nothing is ordered by the stream of a communicator.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._higher_order_ops.effects import with_effects
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import nanotrain
from nanotrain.comm import collectives
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.kernels.linear import write_in_graph
from nanotrain.topology.topology import Topology
from tests.fake_world import fake_context

PACKAGE = Path(nanotrain.__file__).parent

# Operators that take a tensor for its shape, dtype or storage and touch no memory of it.
_METADATA_ONLY = {
    *("aten::empty_like", "aten::new_empty", "aten::new_empty_strided"),
    *("aten::new_zeros", "aten::new_ones", "aten::new_full"),
    *("aten::zeros_like", "aten::ones_like", "aten::full_like"),
    *("aten::rand_like", "aten::randn_like", "aten::_unsafe_view"),
    *("aten::set_", "aten::is_same_size", "aten::resize_"),
    "aten::record_stream",
    "aten::lift_fresh",
}
_READS_WITHOUT_DISPATCH = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})


class Race(AssertionError):
    """A buffer was used while an operation in flight may read or write it."""


class _Buffer:
    """Bytes of one tensor in flight, without keeping its storage alive."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = StorageWeakRef(storage)
        self._address, self._num_bytes = storage.data_ptr(), storage.nbytes()
        self.bytes = _hull(tensor)

    @property
    def is_gone(self) -> bool:
        """Whether the storage was freed, resized or replaced."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return storage is None or (storage.data_ptr(), storage.nbytes()) != (self._address, self._num_bytes)


@dataclass(eq=False)
class InFlight:
    """An operation that was started and not yet waited for."""

    op: str
    started_at: str
    inputs: list[_Buffer]
    outputs: list[_Buffer]
    kept: tuple[Tensor, ...] = ()  # what the allocator would keep (`record_stream`)
    ends_on_host: bool = False  # a copy whose host side is not waited for by the device

    def __str__(self) -> str:
        return f"{self.op} started at {self.started_at}"


class Recorder(TorchDispatchMode):
    """Checks every operator against the operations in flight.

    Attributes:
        num_operators: operators that were compared with at least one buffer in flight.
        num_started: operations started.
    """

    def __init__(self) -> None:
        super().__init__()
        self._flying: list[InFlight] = []
        self.num_operators = self.num_started = 0

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile blocks under the recorder; what their graphs run is checked."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.nanotrain.write_wgrad.default:  # what it reads and writes are operators inside of it
            with self:
                return write_in_graph._init_fn(*args, **(kwargs or {}))
        if func is with_effects:  # the same in a graph: (token, operator, *arguments) -> (token, result)
            return args[0], self.__torch_dispatch__(args[1], types, args[2:], kwargs)
        if self._flying and not func.is_view and func._schema.name not in _METADATA_ONLY:
            self.num_operators += 1
            read, written = _operands(func._schema, args, kwargs or {})
            self.check(func._schema.name, reads=read, writes=written)
        return func(*args, **(kwargs or {}))

    def check(self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Raise `Race` if something in flight conflicts with these accesses, or has lost its storage."""
        self._check_storages(what)
        for flight in self._flying:
            for tensor in reads:
                if any(_overlap(tensor, buffer) for buffer in flight.outputs):
                    raise Race(f"{what} at {_place()} reads an output in flight: {flight}")
            for tensor in writes:
                if any(_overlap(tensor, buffer) for buffer in flight.outputs):
                    raise Race(f"{what} at {_place()} writes to an output in flight: {flight}")
                if any(_overlap(tensor, buffer) for buffer in flight.inputs):
                    raise Race(f"{what} at {_place()} writes to an input in flight: {flight}")

    def start(
        self, op: str, *, inputs: Sequence[Tensor] = (), outputs: Sequence[Tensor] = (), keeps: bool = False
    ) -> InFlight:
        """Note that an operation on these buffers is in flight; it must not conflict with others."""
        self.check(op, reads=inputs, writes=outputs)
        kept = (*inputs, *outputs) if keeps else ()
        flight = InFlight(op, _place(), [_Buffer(t) for t in inputs], [_Buffer(t) for t in outputs], kept)
        self._flying.append(flight)
        self.num_started += 1
        return flight

    def complete(self, flight: InFlight) -> None:
        """Note that an operation was waited for."""
        if flight in self._flying:
            self._check_storages(f"the wait for {flight.op}")
            self._flying.remove(flight)

    def flying(self) -> list[InFlight]:
        """The operations in flight, oldest first."""
        return list(self._flying)

    def finish(self) -> None:
        """Raise `Race` if an operation was never waited for."""
        self._check_storages("the end of the run")
        left = [flight for flight in self._flying if not flight.ends_on_host]
        if left:
            raise Race(f"never waited for: {'; '.join(map(str, left))}")

    def _check_storages(self, what: str) -> None:
        for flight in self._flying:
            if any(buffer.is_gone for buffer in (*flight.inputs, *flight.outputs)):
                raise Race(f"before {what} at {_place()} storage was freed or resized in flight: {flight}")


class _HostReads(TorchFunctionMode):
    """Reports reads of a tensor that are no operators."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_WITHOUT_DISPATCH and self._recorder.flying():
            self._recorder.check(func.__name__, reads=[args[0]])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Handle:
    """torch's `Work` of an operation in flight."""

    recorder: Recorder
    flight: InFlight

    def wait(self) -> None:
        self.recorder.complete(self.flight)


@dataclass(frozen=True)
class _Transport:
    """torch.distributed's functions, which start operations that nobody else takes part in."""

    recorder: Recorder

    def all_reduce(self, tensor: Tensor, *, op: Any, group: Any, **_: Any) -> _Handle:
        handle = self._start("all_reduce", outputs=[tensor])
        if op == dist.ReduceOp.SUM:
            with _disable_current_modes(), torch.no_grad():
                tensor.mul_(dist.get_world_size(group))
        return handle

    def reduce_scatter(self, output: Tensor, tensor: Tensor, *, group: Any, **_: Any) -> _Handle:
        handle = self._start("reduce_scatter", inputs=[tensor], outputs=[output])
        with _disable_current_modes(), torch.no_grad():
            output.copy_(tensor.view(dist.get_world_size(group), -1)[dist.get_rank(group)].view_as(output).clone())
        return handle

    def all_gather(self, output: Tensor, tensor: Tensor, *, group: Any, **_: Any) -> _Handle:
        slices = output.view(dist.get_world_size(group), -1)
        is_in_place = slices[dist.get_rank(group)].data_ptr() == tensor.data_ptr()  # then that slice is not written
        written = [part for i, part in enumerate(slices) if not (is_in_place and i == dist.get_rank(group))]
        handle = self._start("all_gather", inputs=[tensor], outputs=written)
        with _disable_current_modes(), torch.no_grad():
            slices.copy_(tensor.view(1, -1).clone())
        return handle

    def all_to_all(self, output: Tensor, tensor: Tensor, *_: Any, **__: Any) -> _Handle:
        handle = self._start("all_to_all", inputs=[tensor], outputs=[output])
        with _disable_current_modes(), torch.no_grad():
            flat = tensor.reshape(-1)
            received = output.view(-1)
            received.zero_()
            for start in range(0, received.numel() if flat.numel() else 0, max(flat.numel(), 1)):
                part = received[start : start + flat.numel()]
                part.copy_(flat[: part.numel()])
        return handle

    def send(self, tensor: Tensor, *_: Any, **__: Any) -> _Handle:
        return self._start("send", inputs=[tensor])

    def receive(self, tensor: Tensor, *_: Any, **__: Any) -> _Handle:
        handle = self._start("receive", outputs=[tensor])
        with _disable_current_modes(), torch.no_grad():
            tensor.view(-1).copy_(torch.linspace(-0.1, 0.1, tensor.numel()))
        return handle

    def batch(self, operations: Sequence[Any]) -> list[_Handle]:
        return [operation.start(operation.tensor) for operation in operations]

    def all_gather_object(self, gathered: list[Any], obj: Any, **_: Any) -> None:
        gathered[:] = [obj] * len(gathered)

    def reduce_along(self, levels: Sequence[Group], numbers: list[float], *, op: str) -> list[float]:
        return [number * levels[-1].size for number in numbers] if op == "sum" else numbers

    def _start(self, op: str, *, inputs: Sequence[Tensor] = (), outputs: Sequence[Tensor] = ()) -> _Handle:
        return _Handle(self.recorder, self.recorder.start(op, inputs=inputs, outputs=outputs))


@contextmanager
def recorded_world(
    topology: Topology, rank: int, *, backend: str = "nccl"
) -> Iterator[tuple[ParallelContext, Recorder]]:
    """One rank of a world whose collectives are recorded.

    Args:
        topology: of the world.
        rank: which rank this process is.
        backend: "gloo" runs the collectives that nanotrain builds from messages on gloo; "nccl" those of torch.
    """
    recorder = Recorder()
    transport = _Transport(recorder)
    with fake_context(topology, rank) as context, pytest.MonkeyPatch.context() as patch:
        if backend == "gloo":
            patch.setattr(dist, "get_backend", lambda group=None: "gloo")
        patch.setattr(collectives, "_reduce_scatter_flat", transport.reduce_scatter)
        patch.setattr(collectives, "_all_gather_flat", transport.all_gather)
        for name, function in {
            "all_reduce": transport.all_reduce,
            "all_to_all_single": transport.all_to_all,
            "isend": transport.send,
            "irecv": transport.receive,
            "batch_isend_irecv": transport.batch,
            "all_gather_object": transport.all_gather_object,
        }.items():
            patch.setattr(dist, name, function)
        patch.setattr(collectives, "gather_along", lambda levels, obj: [obj] * levels[-1].size)
        patch.setattr(collectives, "broadcast_along", lambda levels, obj: obj)
        patch.setattr(collectives, "reduce_along", transport.reduce_along)
        message = lambda start, tensor, peer, group: SimpleNamespace(start=start, tensor=tensor)  # noqa: E731
        patch.setattr(dist, "P2POp", message)
        with recorder, _HostReads(recorder):
            yield context, recorder


class RecordedTransfer:
    """`HostTransfer` whose copies are in flight until the tensor is back; the allocator keeps both sides."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._leaving: dict[int, InFlight] = {}

    def to_host(self, tensor: Tensor) -> Tensor:
        host = tensor.clone()
        self._leaving[id(host)] = self._recorder.start("copy to the host", inputs=[tensor], outputs=[host], keeps=True)
        return host

    def start_return(self, host: Tensor) -> Any:
        leaving = self._leaving.pop(id(host))
        # On one stream the return is after the copy to the host, and waits for it.
        with _disable_current_modes():
            tensor = host.clone()
        returning = self._recorder.start("copy to the device", outputs=[tensor])

        def wait() -> Tensor:
            self._recorder.complete(leaving)
            self._recorder.complete(returning)
            return tensor

        return SimpleNamespace(wait=wait)


class RecordedCopies:
    """`HostTransfer` of buffers: copies are in flight until the host or the device waits for them, in order."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._started: list[InFlight] = []

    def wait_for_device(self) -> None:
        """Do nothing: writes of this process are complete."""

    def start(self, target: Tensor, source: Tensor) -> Any:
        flight = self._recorder.start("buffer copy", inputs=[source], outputs=[target])
        with _disable_current_modes(), torch.no_grad():
            target.copy_(source)
        self._started.append(flight)
        return SimpleNamespace(wait_on_host=lambda: self._complete(flight))

    def finish(self) -> None:
        """The device waits: it may use the targets; the host must still not write to the sources."""
        for flight in self._started:
            flight.outputs, flight.ends_on_host = [], True

    def _complete(self, last: InFlight) -> None:
        while last in self._started:
            self._recorder.complete(self._started.pop(0))


def _operands(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads and those that it writes to."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        tensors = [value] if isinstance(value, Tensor) else value if isinstance(value, list | tuple) else ()
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        (written if is_write else read).extend(t for t in tensors if isinstance(t, Tensor))
    return read, written


def _hull(tensor: Tensor) -> tuple[int, int]:
    """First and last + 1 byte address of the elements; empty without elements."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def _overlap(tensor: Tensor, buffer: _Buffer) -> bool:
    """Whether a tensor has elements in a buffer, which is contiguous."""
    start, stop = _hull(tensor)
    if not max(start, buffer.bytes[0]) < min(stop, buffer.bytes[1]):
        return False
    if tensor.is_contiguous():
        return True
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(size if stride else 1) * stride).reshape(-1)
    places = start + offsets * tensor.itemsize
    return bool(((places + tensor.itemsize > buffer.bytes[0]) & (places < buffer.bytes[1])).any())


def _place() -> str:
    """The innermost functions of nanotrain that are running, outside comm/."""
    places: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(places) < 3:
        code = frame.f_code
        file = Path(code.co_filename)
        if file.is_relative_to(PACKAGE) and not file.is_relative_to(PACKAGE / "comm"):
            places.append(f"{file.relative_to(PACKAGE)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " <- ".join(places) or "the test"
