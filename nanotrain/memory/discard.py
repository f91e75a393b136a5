"""`discard_output`: compose two functions without keeping the output of the first for the backward.

    inputs --first--> outputs --second--> result

    kept       the inputs of `first`, and what `second` saves beside the outputs of `first`
    discarded  the outputs of `first`, even if `second` saves them
    backward   when `second` first reads a discarded output, `first` runs again; both backwards use its results

A plain checkpoint of `first` would keep its output: the matrix product that follows saves it. Megatron-LM calls this
output-discarding recomputation (`CheckpointWithoutOutput`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

TensorFunction = Callable[..., Any]


def discard_output(
    checkpointed: Callable[[TensorFunction], TensorFunction], first: TensorFunction, *, second: TensorFunction
) -> TensorFunction:
    """`(*inputs, **options) -> second(*first(*inputs), **options)`, without keeping the outputs of `first`.

    Args:
        checkpointed: makes a function recompute what it saves.
        first: its outputs are a tensor or a tuple of tensors.
        second: takes the outputs as positional arguments.
    """

    def first_and_keep(*inputs: Any) -> tuple[Tensor, ...]:
        outputs = first(*inputs)
        kept: tuple[Tensor, ...] = _Keep.apply(*(outputs if isinstance(outputs, tuple) else (outputs,)))
        return kept

    first_again = checkpointed(first_and_keep)

    def run(*inputs: Any, **options: Any) -> Any:
        outputs = first_again(*inputs)
        if not torch.is_grad_enabled() or outputs[0].grad_fn is None:
            return second(*outputs, **options)
        discarded = _Discarded(outputs)
        with saved_tensors_hooks(discarded.pack, _unpack):
            return second(*outputs, **options)

    return run


class _Keep(torch.autograd.Function):
    """Identity that saves its outputs. Under a checkpoint they are recomputed when they are read."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


@dataclass(frozen=True)
class _Reference:
    """A saved tensor as a view of a discarded output."""

    discarded: "_Discarded"
    output: int  # its index
    geometry: tuple[Any, ...]  # size, stride, offset into the storage


class _Discarded:
    """The outputs of one call of `_Keep`."""

    def __init__(self, outputs: tuple[Tensor, ...]) -> None:
        self._node = outputs[0].grad_fn
        # An empty tensor has no address of its own, and nothing to discard.
        self._indices = {x.untyped_storage().data_ptr(): i for i, x in enumerate(outputs) if x.numel()}
        self._num_unread = 0
        self._values: tuple[Tensor, ...] = ()

    def pack(self, tensor: Tensor) -> "Tensor | _Reference":
        """A reference instead of a discarded output; other tensors are kept."""
        index = self._indices.get(tensor.untyped_storage().data_ptr())
        if index is None:
            return tensor
        self._num_unread += 1
        return _Reference(self, index, (tensor.size(), tensor.stride(), tensor.storage_offset()))

    def read(self, reference: _Reference) -> Tensor:
        """The recomputed tensor; all are freed after the last one is read."""
        # torch returns a recomputed tensor only once, but several operations may have saved the same output.
        values = self._values = self._values or self._node.saved_tensors  # type: ignore[union-attr]
        self._num_unread -= 1
        if self._num_unread == 0:
            self._values = ()
        return values[reference.output].as_strided(*reference.geometry)


def _unpack(packed: "Tensor | _Reference") -> Tensor:
    return packed.discarded.read(packed) if isinstance(packed, _Reference) else packed
