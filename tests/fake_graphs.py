"""CUDA graphs without a GPU: operators of a capture are recorded, and a replay runs them again into
the same memory.

    FakeGraphPool   in place of `nanotrain.comm.device.GraphPool`
    FakeGraph       a capture
    install         put the pool in place of CUDA's, in this process

What a capture does on a GPU and here:

    nothing is run          tensors from before the capture keep their values, those of the capture
                            are NaN until the first replay
    addresses are fixed     a replay reads and writes the storages of the capture
    one pool                memory that nobody refers to after the capture is NaN after every
                            replay, as other graphs may have written to it; a replay that reads such
                            memory, or memory from outside that was freed, is an error
    the host waits never    an operator whose result the host needs is an error, as is a copy of
                            host data
    collectives             are part of the graph

Temporaries have new memory in every replay. Python code of the capture does not run again.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import with_effects
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.happens_before import OPERATORS
from tests.host_syncs import HostSyncs
from tests.thread_world import ThreadGroup

_thread = threading.local()  # the capture of this thread


class CaptureError(AssertionError):
    """What CUDA refuses in a capture, or would silently get wrong in a replay."""


@dataclass(frozen=True)
class View:
    """A tensor of a graph: a storage and the geometry."""

    key: int  # of the storage, in `FakeGraph`
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor in a storage, without autograd."""
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Operation:
    """An operator or collective: its function, arguments with views, and its new outputs."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[View | None, ...]


@dataclass
class FakeGraph:
    """The operations of a capture.

    Attributes:
        operations: in order.
        storages: weak references to all storages, by key.
        num_bytes: sizes of the storages that the capture allocated.
        integers: those that hold integers.
        replays: number of replays.
    """

    operations: list[Operation] = field(default_factory=list)
    storages: dict[int, StorageWeakRef] = field(default_factory=dict)
    num_bytes: dict[int, int] = field(default_factory=dict)
    integers: set[int] = field(default_factory=set)
    replays: int = 0

    def replay(self) -> None:
        """Run the operations again."""
        self.replays += 1
        with _disable_current_modes(), torch.no_grad():
            temporary: dict[int, torch.UntypedStorage] = {}
            for operation in self.operations:
                self._run(operation, temporary)

    def _run(self, operation: Operation, temporary: dict[int, torch.UntypedStorage]) -> None:
        def tensor_of(view: View) -> Tensor:
            return view.on(self._storage(view.key, temporary))

        args, kwargs = tree_map_only(View, tensor_of, (operation.args, operation.kwargs))
        results = tree_leaves(operation.function(*args, **kwargs))
        for view, result in zip(operation.outputs, results, strict=False):
            if view is None:
                continue
            storage = self._live(view.key)
            if storage is None and view.key not in temporary:
                temporary[view.key] = result.untyped_storage()
            else:
                tensor_of(view).copy_(result)

    def _storage(
        self, key: int, temporary: dict[int, torch.UntypedStorage]
    ) -> torch.UntypedStorage:
        storage = self._live(key)
        if storage is not None:
            return storage
        if key not in self.num_bytes:
            raise CaptureError("a replay uses memory from before the capture that was freed")
        if key not in temporary:  # written by `out=`
            temporary[key] = torch.UntypedStorage(self.num_bytes[key])
        return temporary[key]

    def _live(self, key: int) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(self.storages[key].cdata)

    @property
    def static_bytes(self) -> int:
        """Bytes that the capture allocated and that something still refers to."""
        return sum(size for key, size in self.num_bytes.items() if not self.storages[key].expired())


class _Recorder(TorchDispatchMode):
    """Records the operators of a capture, also those of compiled functions."""

    supports_higher_order_operators = True

    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self.graph = graph
        self._before: dict[int, tuple[StorageWeakRef, Tensor]] = {}  # values to restore

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OPERATORS:  # what it reads and writes are operators inside of it
            with self:
                return OPERATORS[func]._init_fn(*args, **kwargs)
        # the same in a graph of the compiler: (token, operator, *arguments) -> (token, result)
        if func is with_effects:
            return args[0], self.__torch_dispatch__(args[1], types, args[2:], kwargs)
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        written = _written(func, args, kwargs)
        for tensor in written:
            self.save(tensor)
        seen = self.views((args, kwargs))
        result = func(*args, **kwargs)
        outputs: list[View | None] = []
        for leaf in tree_leaves(result):
            is_new = isinstance(leaf, Tensor) and _key(leaf) not in given
            if is_new:
                self.add(leaf)
            outputs.append(_view(leaf) if is_new else None)
        if written or any(outputs):
            self.graph.operations.append(Operation(func, seen[0], seen[1], tuple(outputs)))
        return result

    def views(self, structure: Any) -> Any:
        """A structure with views in place of tensors."""

        def view_of(tensor: Tensor) -> View:
            self.graph.storages.setdefault(_key(tensor), StorageWeakRef(tensor.untyped_storage()))
            return _view(tensor)

        return tree_map_only(Tensor, view_of, structure)

    def add(self, tensor: Tensor) -> None:
        """A storage that the capture allocated."""
        storage = tensor.untyped_storage()
        self.graph.storages[_key(tensor)] = StorageWeakRef(storage)
        self.graph.num_bytes[_key(tensor)] = storage.nbytes()
        if not tensor.is_floating_point():
            self.graph.integers.add(_key(tensor))

    def save(self, tensor: Tensor) -> None:
        """Keep the values of a storage from before the capture, which is about to be written."""
        key = _key(tensor)
        if key in self.graph.num_bytes or key in self._before:
            return
        with _disable_current_modes():
            storage = tensor.untyped_storage()
            self._before[key] = StorageWeakRef(storage), _bytes_of(storage).clone()

    def finish(self) -> None:
        """Restore what was written, and fill what was allocated with NaN."""
        with _disable_current_modes():
            for reference, values in self._before.values():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                if storage is not None:
                    _bytes_of(storage).copy_(values)
            for key in self.graph.num_bytes:
                storage = self.graph._live(key)
                if storage is not None:  # NaN, or 0, as a capture of the backward has indices
                    _bytes_of(storage).fill_(0 if key in self.graph.integers else 0xFF)


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _view(tensor: Tensor) -> View:
    return View(
        _key(tensor),
        tensor.dtype,
        tuple(tensor.size()),
        tuple(tensor.stride()),
        tensor.storage_offset(),
    )


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes to."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    return written


class FakeGraphPool:
    """`GraphPool` of graphs that are recorded.

    Attributes:
        graphs: all captures, in order.
    """

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        pools = getattr(_thread, "pools", None)
        if pools is not None:
            pools.append(self)

    @contextmanager
    def capture(self) -> Iterator[FakeGraph]:
        """Record the operators of the block."""
        graph = FakeGraph()
        recorder = _Recorder(graph)
        _thread.recorder = recorder
        syncs = HostSyncs()
        try:
            with syncs, recorder:
                yield graph
        finally:
            _thread.recorder = None
        if syncs.places:
            raise CaptureError(f"the host waits in a capture: {syncs.places}")
        recorder.finish()
        self.graphs.append(graph)


_post = ThreadGroup._post


def _post_or_record(
    group: ThreadGroup, name: str, tensors: Any, compute: Any, *, op: Any = None
) -> Any:
    """`ThreadGroup._post`, as an operation of the capture of this thread, if there is one."""
    recorder: _Recorder | None = getattr(_thread, "recorder", None)
    if recorder is None:
        return _post(group, name, tensors, compute, op=op)
    for tensor in tree_leaves(tensors):
        recorder.save(tensor)

    def run(*posted: Any) -> None:
        work = _post(group, name, posted if len(posted) > 1 else posted[0], compute, op=op)
        work.wait()

    args = tensors if isinstance(tensors, tuple) else (tensors,)
    views = recorder.views(args)
    recorder.graph.operations.append(Operation(run, views, {}, ()))
    with _disable_current_modes():
        return _post(group, name, tensors, compute, op=op)


def install() -> None:
    """Capture into `FakeGraphPool` in this process from now on."""
    from nanotrain.memory import cuda_graphs

    cuda_graphs.GraphPool = FakeGraphPool  # type: ignore[misc]
    ThreadGroup._post = _post_or_record  # type: ignore[method-assign]


@contextmanager
def counting() -> Iterator[list[FakeGraphPool]]:
    """The pools that this thread makes inside the block."""
    _thread.pools = []
    try:
        yield _thread.pools
    finally:
        _thread.pools = None
