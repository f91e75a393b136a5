"""`call_again`: call a function and keep only its inputs; its backward runs the function again.

    forward    each tensor that autograd saves inside the function is replaced by an empty `_Saved`
    backward   the first read of one runs the function again, up to the last tensor that was saved, and fills all;
               each is freed when its operation has read it

The second run has the random numbers of the first. Source: Chen et al. 2016, section 3; the same as non-reentrant
`torch.utils.checkpoint`, at half of its time per saved tensor. torch's imports torch._dynamo too (see `comm/eager.py`).
Autocast is not restored: nanotrain has none.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nanotrain.comm.device import RandomState


def call_again(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    options: Mapping[str, Any],
    around: Callable[[], AbstractContextManager[None]],
) -> Any:
    """`function(*args, **options)`, of which autograd keeps only the tensors among the arguments.

    They are kept through the saved-tensor hooks of the caller, which may discard them.

    Args:
        function: saves the same tensors in the same order when it runs again.
        args: positional arguments.
        options: keyword arguments.
        around: makes the context that is entered around the second run.
    """
    if not torch.is_grad_enabled():
        return function(*args, **options)
    call = _Call(function, args, options=options, around=around)
    with saved_tensors_hooks(call.pack, call.unpack):
        return function(*args, **options)


class _StopRun(Exception):
    """Ends the second run: nothing after the last saved tensor is needed."""


class _Saved:
    """Stands for a tensor that autograd saved; has the tensor from the second run to the read."""

    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value: Tensor | None = None


class _Call:
    """One call of a function, and what is needed to run it again."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        options: Mapping[str, Any],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._function, self._around, self._names = function, around, tuple(options)
        self._inputs = _Inputs((*args, *options.values()))
        self._random = RandomState.now(self._inputs.device)
        # Weak: an operation that is freed without a read frees its tensor too.
        self._saved: list[ref[_Saved]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        self._num_filled, self._is_filled = 0, False

    def pack(self, tensor: Tensor) -> _Saved:
        """Stand for a tensor of the first run."""
        saved = _Saved()
        self._saved.append(ref(saved))
        self._kinds.append((tensor.shape, tensor.dtype))
        return saved

    def unpack(self, saved: _Saved) -> Tensor:
        """The tensor of the second run; to be read once."""
        if not self._is_filled:
            self._run_again()
        value, saved.value = saved.value, None
        if value is None:
            raise RuntimeError("a recomputed tensor was read twice: a graph with recomputation has one backward")
        return value

    def _run_again(self) -> None:
        inputs = self._inputs.read()
        num_args = len(inputs) - len(self._names)
        options = dict(zip(self._names, inputs[num_args:], strict=True))
        try:
            with (
                self._random.restored(),
                self._around(),
                torch.enable_grad(),
                saved_tensors_hooks(self._fill, _same),
            ):
                self._function(*inputs[:num_args], **options)
        except _StopRun:
            pass
        if self._num_filled != len(self._saved):
            raise RuntimeError(
                f"{self._function} saved {len(self._saved)} tensors and {self._num_filled} when it ran again: "
                "a recomputed function must not depend on what has changed since"
            )
        self._is_filled = True

    def _fill(self, tensor: Tensor) -> Tensor:
        """Keep a tensor of the second run."""
        index, value = self._num_filled, tensor.detach()  # its graph would refer to itself
        if self._kinds[index] != (value.shape, value.dtype):
            first, now = self._kinds[index], (value.shape, value.dtype)
            raise RuntimeError(f"{self._function} saved {first} and, when it ran again, {now} as tensor {index}")
        self._num_filled += 1
        saved = self._saved[index]()
        if saved is not None:
            saved.value = value
        if self._num_filled == len(self._saved):
            raise _StopRun
        return value


class _Inputs:
    """Arguments of a call; tensors are saved as an operation of the graph saves them."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._others = [None if isinstance(value, Tensor) else value for value in values]
        tensors = [(i, value) for i, value in enumerate(values) if isinstance(value, Tensor)]
        self._indices = [i for i, _ in tensors]
        self._needs_grad = [tensor.requires_grad for _, tensor in tensors]
        self.device = tensors[0][1].device if tensors else torch.device("cpu")
        # Detached: the node of an operation on the tensors themselves would keep the graph before this call.
        start = torch.empty(0, requires_grad=True)
        self._node = _Keep.apply(start, *(tensor.detach() for _, tensor in tensors)).grad_fn

    def read(self) -> list[Any]:
        """The arguments; tensors are leaves that require a gradient where they did."""
        values = list(self._others)
        for i, tensor, needs_grad in zip(self._indices, self._node.saved_tensors, self._needs_grad, strict=True):
            values[i] = tensor.detach().requires_grad_(needs_grad)
        return values


class _Keep(torch.autograd.Function):
    """Saves its inputs."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return start.view_as(start)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("nothing depends on the result")


def _same(tensor: Tensor) -> Tensor:
    return tensor
