"""One matrix product of layers that share an input, over weights that lie next to each other in the parameter buffer.

    JoinedWeight    the rows of all layers as one matrix, a view of the buffer
    JoinedLinears   the products of these layers: one fprop, one dgrad, one wgrad
    traced_linears  the same inside of a compiled graph

    weight    [P, I]     rows of value, key and query, or of up and gate: buffers are filled in reverse
    outputs   [..., P]   each layer's output is a slice of the channels
    grads     [T, P]     of the outputs; copied together where they come apart (`side_by_side.py`)

The gradient buffer has the same order, so that wgrad is written there by one product (`grad_view.py`).

    T tokens   I inputs   O outputs of a layer   P outputs of all layers together
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nanotrain.kernels.grad_view import GradView, attach, grad_view_of
from nanotrain.kernels.linear import Linear, Linears, accumulate_wgrad, dgrad, fprop, wgrad
from nanotrain.kernels.side_by_side import join_sides
from nanotrain.kernels.traced_wgrad import writes_in_graph


@dataclass(frozen=True, eq=False)
class JoinedWeight:
    """The weights of layers that share an input as one matrix."""

    weight: Tensor  # [P, I], a view of the parameter buffer, with the `grad_view` of all rows where products write
    order: tuple[int, ...]  # the layers in the order of the rows
    rows_of: tuple[int, ...]  # the inverse of `order`: the place of each layer in it
    sizes: tuple[int, ...]  # rows per layer, in the order of the rows

    @classmethod
    def of(cls, weights: Sequence[Tensor]) -> "JoinedWeight":
        """Join weights [O, I] that lie one after the other in one storage, in any order, and so do their gradients."""
        order = tuple(sorted(range(len(weights)), key=lambda i: weights[i].storage_offset()))
        rows = [weights[i] for i in order]
        rows_of = tuple(order.index(layer) for layer in range(len(order)))
        joined = cls(_stack([row.data for row in rows]), order, rows_of, tuple(len(row) for row in rows))
        views = [view for row in rows if (view := grad_view_of(row)) is not None]
        assert len(views) in (0, len(rows)), "products write the gradients of all weights of a bucket, or of none"
        if views:
            attach(_grad_view(views), joined.weight)
        return joined

    def split(self, x: Tensor, *, dim: int = -1) -> list[Tensor]:
        """[..., P] -> one [..., O] per layer, views."""
        parts = x.split(self.sizes, dim)
        return [parts[row] for row in self.rows_of]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """One [T, O] per layer -> [T, P], without a copy where they are slices of one tensor in the order of rows."""
        return join_sides([parts[layer] for layer in self.order])


class JoinedLinears(Linears):
    """The products of layers without biases whose weights are joined, for one microbatch."""

    def __init__(self, linears: Sequence[Linear], joined: JoinedWeight) -> None:
        super().__init__(linears)
        self._joined = joined

    def fprop(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., I] -> one [..., O] per layer, slices of one tensor."""
        out = fprop(x, self._joined.weight)
        # `.data`: autograd takes views that a function returns for views of its input.
        return tuple(part.data for part in self._joined.split(out))

    def join(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """One [T, O] per layer -> the same as slices of one tensor."""
        return self._joined.split(self._joined.join(grads))

    def dgrad(self, grads: Sequence[Tensor]) -> Tensor:
        """One [T, O] per layer -> [T, I]."""
        return dgrad(self._joined.join(grads), self._joined.weight)

    def wgrad(self, grads: Sequence[Tensor], x: Tensor) -> list[Tensor | None]:
        """One [T, O] per layer, [T, I] -> the gradients of the weights, None for one that was written."""
        grad, view = self._joined.join(grads), grad_view_of(self._joined.weight)
        if view is not None and accumulate_wgrad(grad, x, view=view):
            return [None] * len(self.linears)
        return [*self._joined.split(wgrad(grad, x), dim=0)]


def traced_linears(x: Tensor, linears: Sequence[Linear], *, joined: JoinedWeight) -> tuple[Tensor, ...]:
    """[..., I] -> one [..., O] per layer, inside a compiled graph, or without gradients."""
    if not torch.is_grad_enabled():  # torch's compiler breaks the graph at a function that saves nothing
        return tuple(joined.split(fprop(x, joined.weight)))
    rows = [linears[layer].weight for layer in joined.order]
    writes = writes_in_graph(grad_view_of(joined.weight))
    out = _TracedJoined.apply(x, joined.weight, writes, *rows)
    return tuple(joined.split(out))


class _TracedJoined(torch.autograd.Function):
    """The weights are arguments, in the order of rows, so that autograd returns their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, writes: bool, *rows: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.writes, ctx.sizes = writes, [len(row) for row in rows]
        return fprop(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, flat_x = grads[0].reshape(-1, grads[0].shape[-1]), x.reshape(-1, x.shape[-1])
        grad_rows: tuple[Tensor | None, ...] = (None,) * len(ctx.sizes)
        if ctx.writes:
            torch.ops.nanotrain.write_wgrad(weight, (grad, flat_x))
        else:
            grad_rows = wgrad(grad, flat_x).split(ctx.sizes)
        grad_x = dgrad(grad, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, *grad_rows


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Contiguous [O, I] tensors, one right after the other in one storage -> [P, I], a view."""
    starts = accumulate((part.numel() for part in parts), initial=parts[0].storage_offset())
    for part, start in zip(parts, starts, strict=False):
        is_next = part.storage_offset() == start and part.is_contiguous()
        assert is_next and part.untyped_storage()._cdata == parts[0].untyped_storage()._cdata, "planned as neighbours"
    return parts[0].as_strided((sum(len(part) for part in parts), parts[0].shape[1]), parts[0].stride())


def _grad_view(views: Sequence[GradView]) -> GradView:
    """One `GradView` of the gradients of all rows, from those of each weight."""
    in_graph = [view.start_write_in_graph for view in views if view.start_write_in_graph is not None]
    assert len(in_graph) in (0, len(views)), "the rows are in one bucket"

    def mark_ready() -> None:
        for view in views:
            view.mark_ready()

    return GradView(
        views[0].dtype,
        partial(_start_write, [view.start_write for view in views]),
        mark_ready,
        start_write_in_graph=partial(_start_write, in_graph) if in_graph else None,
    )


def _start_write(starts: Sequence[Callable[[], tuple[Tensor, bool] | None]]) -> tuple[Tensor, bool] | None:
    """`GradView.start_write` of all rows, from those of each weight."""
    targets = [target for start in starts if (target := start()) is not None]
    if not targets:
        return None
    assert len(targets) == len(starts), "the rows are in one bucket"
    has_any = any(has_grads for _, has_grads in targets)
    for buffer, has_grads in targets:
        if has_any and not has_grads:  # another weight has another use
            buffer.zero_()
    return _stack([buffer for buffer, _ in targets]), has_any
