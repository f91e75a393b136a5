"""Recorder of law L9 (happens-before): no buffer is touched between the start of an operation and
the wait for it.

    with recorded_world(topology, rank) as (context, recorder):
        ...                          # build and train as on this rank of the world
        recorder.finish()            # every operation that was started was waited for

One process is one rank of a world of any size. Collectives send nothing: they write plausible
values and stay in flight until their handle is waited for. The recorder
(nanotrain/comm/recorder.py) compares the bytes that every operator reads and writes with the
buffers in flight. Values of other ranks are made up, so only the order of events is checked here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._higher_order_ops.effects import with_effects
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from nanotrain.comm import collectives, recorder
from nanotrain.comm.autograd import collective_in_graph
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.recorder import InFlight
from nanotrain.kernels.fp8.products import write_fp8_in_graph
from nanotrain.kernels.linear import write_in_graph
from nanotrain.parallel.tp.products import backward_in_graph, forward_in_graph
from nanotrain.topology.topology import Topology
from tests.fake_world import fake_context

OPERATORS = {
    torch.ops.nanotrain.write_wgrad.default: write_in_graph,
    torch.ops.nanotrain.write_fp8_wgrad.default: write_fp8_in_graph,
    torch.ops.nanotrain.collective.default: collective_in_graph,
    torch.ops.nanotrain.parallel_forward.default: forward_in_graph,
    torch.ops.nanotrain.parallel_backward.default: backward_in_graph,
}
PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm"})
_READS_WITHOUT_DISPATCH = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})


class Recorder(recorder.Recorder):
    """The recorder, also inside compiled blocks: what their graphs run is checked."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.num_started = self.num_products = 0
        # operations in the order in which they were started, with the bytes of their buffers
        self.order: list[tuple[Any, ...]] = []
        self.hidden_by: list[
            tuple[str, int]
        ] = []  # operations that were waited for, and the products since their start
        self._products_at: dict[InFlight, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OPERATORS:  # what it reads and writes are operators inside of it
            with self:
                return OPERATORS[func]._init_fn(*args, **(kwargs or {}))
        # the same in a graph: (token, operator, *arguments) -> (token, result)
        if func is with_effects:
            return args[0], self.__torch_dispatch__(args[1], types, args[2:], kwargs)
        self.num_products += func.overloadpacket.__name__ in PRODUCTS
        return super().__torch_dispatch__(func, types, args, kwargs)

    def start(self, op: str, **buffers: Any) -> InFlight:
        self.num_started += 1
        tensors = (*buffers.get("inputs", ()), *buffers.get("outputs", ()))
        sizes = [tensor.nbytes for tensor in tensors]
        self.order.append((op, *sizes))
        flight = super().start(op, **buffers)
        self._products_at[flight] = self.num_products
        return flight

    def complete(self, operation: InFlight) -> None:
        if operation in self.in_flight:
            self.hidden_by.append((operation.op, self.num_products - self._products_at[operation]))
        super().complete(operation)


class _HostReads(TorchFunctionMode):
    """Reports reads of a tensor that are no operators."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_WITHOUT_DISPATCH and self._recorder.in_flight:
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
            output.copy_(
                tensor.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
                .view_as(output)
                .clone()
            )
        return handle

    def all_gather(self, output: Tensor, tensor: Tensor, *, group: Any, **_: Any) -> _Handle:
        slices = output.view(dist.get_world_size(group), -1)
        # then that slice is not written
        is_in_place = slices[dist.get_rank(group)].data_ptr() == tensor.data_ptr()
        written = [
            part for i, part in enumerate(slices) if not (is_in_place and i == dist.get_rank(group))
        ]
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

    def reduce_along(
        self, levels: Sequence[Group], numbers: list[float], *, op: str
    ) -> list[float]:
        return [number * levels[-1].size for number in numbers] if op == "sum" else numbers

    def _start(
        self, op: str, *, inputs: Sequence[Tensor] = (), outputs: Sequence[Tensor] = ()
    ) -> _Handle:
        return _Handle(self.recorder, self.recorder.start(op, inputs=inputs, outputs=outputs))


@contextmanager
def recorded_world(
    topology: Topology, rank: int, *, backend: str = "nccl"
) -> Iterator[tuple[ParallelContext, Recorder]]:
    """One rank of a world whose collectives are recorded.

    Args:
        topology: of the world.
        rank: which rank this process is.
        backend: "gloo" runs the collectives that nanotrain builds from messages on gloo; "nccl"
            those of torch.
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
    """`HostTransfer` whose copies are in flight until the tensor is back; the allocator keeps both
    sides.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._leaving: dict[int, InFlight] = {}

    def to_host(self, tensor: Tensor) -> Tensor:
        host = tensor.clone()
        self._leaving[id(host)] = self._recorder.start(
            "copy to the host", inputs=[tensor], outputs=[host], keeps=True
        )
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
    """`HostTransfer` of buffers: copies are in flight until the host or the device waits for them,
    in order.
    """

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
