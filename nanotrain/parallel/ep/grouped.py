"""Grouped matrix products: the rows of every expert times that expert's matrix, all experts at once.

    grouped_linear   with gradients, for rows that may have a tail
    KERNELS          how: torch's grouped product, or one product per expert where that one cannot

    rows [R, I], sorted by expert    ends [E] int32
    | expert 0   | expert 1 | (none for 2) | expert 3      | tail |
                 ends[0]    ends[1]=ends[2]                ends[3]

Rows behind the last end belong to nobody (dropped choices). torch leaves their results as uninitialised memory,
forward and backward, so where a tail can occur it is overwritten with zeros.

    R rows   E experts of this rank   I inputs   O outputs
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# torch 2.10 has it under both names, older ones under the private name only.
_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ROW_BYTES = 16  # torch's grouped product wants rows that begin at multiples of this


class Kernel(Protocol):
    """The two products that forward and backward are made of; what stands in a tail is undefined."""

    def times(self, rows: Tensor, matrices: Tensor, *, ends: Tensor) -> Tensor:
        """[R, I], [E, I, O] -> [R, O]: every row times its expert's matrix."""

    def outer(self, grad: Tensor, rows: Tensor, *, ends: Tensor) -> Tensor:
        """[R, O], [R, I] -> [E, O, I]: the sum over an expert's rows of their outer products."""


class Grouped:
    """torch's grouped product."""

    def times(self, rows: Tensor, matrices: Tensor, *, ends: Tensor) -> Tensor:
        """[R, I], [E, I, O] -> [R, O]."""
        out: Tensor = _grouped_mm(rows, matrices, offs=ends)
        return out

    def outer(self, grad: Tensor, rows: Tensor, *, ends: Tensor) -> Tensor:
        """[R, O], [R, I] -> [E, O, I]."""
        out: Tensor = _grouped_mm(grad.t(), rows, offs=ends)
        return out


class Looped:
    """One product per expert, for any size of matrix; the host waits for `ends`."""

    def times(self, rows: Tensor, matrices: Tensor, *, ends: Tensor) -> Tensor:
        """[R, I], [E, I, O] -> [R, O]."""
        *parts, tail = rows.split(_counts(rows, ends))
        products = [part @ matrix for part, matrix in zip(parts, matrices.unbind(), strict=True)]
        return torch.cat([*products, rows.new_empty(len(tail), matrices.shape[2])])

    def outer(self, grad: Tensor, rows: Tensor, *, ends: Tensor) -> Tensor:
        """[R, O], [R, I] -> [E, O, I]."""
        counts = _counts(rows, ends)
        *grads, _ = grad.split(counts)
        *parts, _ = rows.split(counts)
        return torch.stack([grad.t() @ part for grad, part in zip(grads, parts, strict=True)])


KERNELS: dict[str, Kernel] = {"grouped": Grouped(), "looped": Looped()}


def pick_kernel(inputs: int, outputs: int, *, dtype: torch.dtype) -> str:
    """The kernel for matrices of that size: torch's grouped product where their rows are aligned.

    >>> pick_kernel(64, 128, dtype=torch.float32), pick_kernel(64, 23, dtype=torch.float32)
    ('grouped', 'looped')
    """
    is_aligned = all(size * dtype.itemsize % _ROW_BYTES == 0 for size in (inputs, outputs))
    return "grouped" if is_aligned and _grouped_mm is not None else "looped"


class WeightGradQueue(Protocol):
    """Where weight gradients are put off, by a pipeline schedule that fills its bubbles with them."""

    is_deferring: bool

    def put(self, work: Any) -> None:
        """Take the work of one layer's backward."""


@dataclass(frozen=True)
class GroupedProduct:
    """How a layer multiplies.

    Args:
        kernel: name in KERNELS.
        may_drop: whether rows can have a tail; its results and gradients are then zero.
        weight_grads: where weight gradients are put off; None computes them at once.
    """

    kernel: str
    may_drop: bool = False
    weight_grads: WeightGradQueue | None = None


def grouped_linear(rows: Tensor, weight: nn.Parameter, *, ends: Tensor, product: GroupedProduct) -> Tensor:
    """Every expert's rows times its matrix.

    Args:
        rows: [R, I], sorted by expert.
        weight: [E, O, I].
        ends: [E] int32, where each expert's rows end.
        product: how.

    Returns:
        [R, O].
    """
    out: Tensor = _GroupedLinear.apply(rows, weight, ends, product)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: nn.Parameter, ends: Tensor, product: GroupedProduct) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.product, ctx.parameter = product, weight
        out = KERNELS[product.kernel].times(rows, weight.transpose(1, 2), ends=ends)
        return _without_tail(out, ends) if product.may_drop else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight, ends = ctx.saved_tensors
        product: GroupedProduct = ctx.product
        kernel, queue = KERNELS[product.kernel], product.weight_grads
        grad = grads[0].contiguous()  # an expanded gradient has strides that the product refuses
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = kernel.times(grad, weight, ends=ends)
            grad_rows = _without_tail(grad_rows, ends) if product.may_drop else grad_rows
        if ctx.needs_input_grad[1] and queue is not None and queue.is_deferring:
            queue.put(_LaterGrad(ctx.parameter, kernel, grad, rows, ends))
        elif ctx.needs_input_grad[1]:
            grad_weight = kernel.outer(grad, rows, ends=ends)
        return grad_rows, grad_weight, None, None


@dataclass(frozen=True)
class _Delivery:
    """A gradient and the parameter it belongs to."""

    parameter: nn.Parameter
    grad: Tensor


@dataclass(frozen=True)
class _LaterGrad:
    """A weight gradient still to be computed."""

    parameter: nn.Parameter
    kernel: Kernel
    grad: Tensor
    rows: Tensor
    ends: Tensor

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """What it belongs to."""
        return (self.parameter,)

    def start(self) -> None:
        """Nothing to communicate."""

    def finish(self) -> Sequence[_Delivery]:
        """Compute it."""
        return (_Delivery(self.parameter, self.kernel.outer(self.grad, self.rows, ends=self.ends)),)


def _counts(rows: Tensor, ends: Tensor) -> list[int]:
    """Rows of each expert and, last, of the tail."""
    stops = [0, *ends.tolist(), len(rows)]
    return [stop - start for start, stop in zip(stops, stops[1:], strict=False)]


def _without_tail(rows: Tensor, ends: Tensor) -> Tensor:
    """Zeros behind the last end, whatever bits stand there; the host does not wait to learn where that is."""
    is_tail = torch.arange(len(rows), device=rows.device) >= ends[-1]
    return rows.masked_fill_(is_tail[:, None], 0)
