"""Recomputation: functions of a stage run again in the backward instead of keeping activations.

    Recompute.checkpointed   a function that keeps its arguments (torch.utils.checkpoint)
    Recompute.discarding     two functions, of which the second does not keep what the first returns

A plain checkpoint of a norm would keep its output, because the matrix product that follows saves
it. A pair of functions discards it, as Megatron-LM's `CheckpointWithoutOutput` does:

    inputs --first--> outputs --second--> result

    kept       the inputs of `first`, and the tensors that only `second` saves
    discarded  the outputs of `first`, even if `second` saves them
    backward   `first` runs again when `second` first reads a discarded output; both backwards use
               the results

In a compiled graph `first` is a checkpoint that the compiler sees: the backward of the graph
contains `first` again. Where `second` runs between graphs, so does `first`.

Source: Chen et al. 2016. Parameters are not copied: the second run reads them during the backward
pass, before the optimizer step changes them. The functions of a block are in
recomputed_pairs.py.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from nanotrain.comm.autograd import eager, eager_or_graph

TensorFunction = Callable[..., Any]


class Recompute(threading.local):
    """Recomputation in one stage.

    Per thread, as a forward may alternate with the backward of another microbatch.

    Attributes:
        is_recomputing: True while a function runs for the second time. Side effects of a forward
            pass (statistics, storage of gathered parameters) must not happen again then.
    """

    def __init__(self) -> None:
        self.is_recomputing = False

    def checkpointed(self, function: TensorFunction) -> TensorFunction:
        """A function that keeps only its arguments and runs again when its backward begins."""

        def run(*args: Any, **options: Any) -> Any:
            """Call `function` without keeping its activations; the backward calls it again."""
            # `call` must not reference the tensors: they may be discarded
            names = tuple(options)
            num_args = len(args)

            def call(*values: Any) -> Any:
                named = dict(zip(names, values[num_args:], strict=True))
                return function(*values[:num_args], **named)

            # All arguments are positional: torch keeps positional ones through saved-tensor hooks,
            # which may discard them.
            # No block draws from the random state of torch: dropout masks are a function of
            # samples.
            return checkpoint(
                call,
                *args,
                *options.values(),
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=self._contexts,
            )

        return eager(run)

    def discarding(
        self, first: TensorFunction, *, second: TensorFunction, in_graphs: bool = False
    ) -> tuple[TensorFunction, TensorFunction]:
        """Two functions with the same results; the second does not keep the outputs of the first.

        Args:
            first: returns a tensor or a tuple of tensors; recomputed.
            second: called with these tensors as arguments.
            in_graphs: whether a compiled block has both functions in its graphs.
        """

        def first_and_keep(*inputs: Any, **options: Any) -> Any:
            """Call the first function, and mark its outputs as discardable."""
            outputs = first(*inputs, **options)
            if isinstance(outputs, tuple):
                return _Keep.apply(*outputs)
            (kept,) = _Keep.apply(outputs)
            return kept

        def run_second(*inputs: Any, **options: Any) -> Any:
            """Call the second function, which saves references to marked outputs."""
            outputs = [x for x in (*inputs, *options.values()) if _is_kept(x)]
            if not outputs:  # without gradients
                return second(*inputs, **options)
            discarded = _Discarded(outputs)
            with saved_tensors_hooks(discarded.pack, _unpack):
                return second(*inputs, **options)

        run_first = self.checkpointed(first_and_keep)
        if not in_graphs:
            return run_first, eager(run_second)
        return eager_or_graph(run_first, _recomputed_in_graph(first)), eager_or_graph(
            run_second, second
        )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of the first and of the second run of a function."""
        return nullcontext(), self._recomputing()

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Set `is_recomputing` in the block."""
        before = self.is_recomputing
        self.is_recomputing = True
        try:
            yield
        finally:
            self.is_recomputing = before


class _Keep(torch.autograd.Function):
    """Identity that saves its outputs; under a checkpoint they are recomputed when read."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors, saved for the backward."""
        ctx.save_for_backward(*tensors)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _is_kept(value: Any) -> bool:
    """Whether a value is an output of `_Keep`."""
    return isinstance(value, Tensor) and isinstance(value.grad_fn, _Keep._backward_cls)


@dataclass(frozen=True)
class _Reference:
    """A saved tensor as a view of a discarded output."""

    discarded: "_Discarded"
    output: int  # its index
    geometry: tuple[Any, ...]  # size, stride, offset into the storage


class _Discarded:
    """The outputs of one call of `_Keep`."""

    def __init__(self, outputs: list[Tensor]) -> None:
        self._node = outputs[0].grad_fn
        # not by address: tensors on the meta device have none, and empty ones share theirs
        self._indices = {x.untyped_storage()._cdata: x.output_nr for x in outputs if x.numel()}
        self._num_unread = 0
        self._values: tuple[Tensor, ...] = ()

    def pack(self, tensor: Tensor) -> "Tensor | _Reference":
        """A reference in place of a discarded output; other tensors are kept."""
        index = self._indices.get(tensor.untyped_storage()._cdata)
        if index is None:
            return tensor
        self._num_unread += 1
        return _Reference(self, index, (tensor.size(), tensor.stride(), tensor.storage_offset()))

    def read(self, reference: _Reference) -> Tensor:
        """The recomputed tensor; all are freed after the last one is read."""
        # torch returns a recomputed tensor only once, but several operations may have saved the
        # same output.
        values = self._values = self._values or self._node.saved_tensors  # type: ignore[union-attr]
        self._num_unread -= 1
        if self._num_unread == 0:
            self._values = ()
        return values[reference.output].as_strided(*reference.geometry)


def _recomputed_in_graph(function: TensorFunction) -> TensorFunction:
    """A function that the backward of a compiled graph contains again."""

    def run(*args: Any, **options: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **options)

    return run


def _unpack(packed: "Tensor | _Reference") -> Tensor:
    if isinstance(packed, _Reference):
        return packed.discarded.read(packed)
    return packed
