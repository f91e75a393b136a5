"""Grouped matrix products: one call multiplies the tokens of every expert with its weight.

    grouped_linear   a grouped linear layer, with gradients and deferred wgrad
    GroupedMM        its fprop, dgrad and wgrad by torch's kernel; dropped tokens are undefined
    LoopedMM         the same, one product per expert

    x [T, I], sorted by expert       offs [E] int32, the end of each expert's tokens
    | expert 0   | expert 1 | expert 3 (none for 2) | dropped |
                 offs[0]    offs[1] = offs[2]       offs[3]

With `--gradient-accumulation-fusion` weight gradients are written where gradients are accumulated.
torch's grouped product cannot: it has no `out`, and its output has the dtype of its inputs. In 16
bits on GPUs a kernel of this project does (triton_grouped_wgrad.py), on CPUs one product per
expert. Elsewhere the output of torch's product is added.

Tokens after the last offset belong to no expert (dropped by capacity). torch leaves their outputs
and gradients uninitialized; if tokens can be dropped, they are overwritten with zeros.

    T tokens, one per token and chosen expert   E local experts   I inputs   O outputs
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.device import compute_capability
from nanotrain.kernels.compiler import runs_triton
from nanotrain.kernels.deferred_wgrad import WgradQueue, is_deferring
from nanotrain.kernels.linear import GradView, grad_view_of, write_wgrad

_grouped_mm: Any = F.grouped_mm
# oneDNN compiles and keeps a kernel for every new number of rows of a 16-bit product: measured on a
# CPU with AMX, 0.75 MB per kernel, and 490 kernels in 40 steps of a small model. So rows are padded
# to multiples of this number.
CPU_ROWS = 64
_ALIGNMENT_BYTES = 16  # torch's grouped product requires rows that begin at multiples of this
# From this compute capability on, torch's grouped product may leave the weight gradient of an
# expert without tokens as it finds the memory: github.com/pytorch/pytorch/issues/172439 (CUTLASS
# before 4.4 on Blackwell).
_UNWRITTEN_FROM = (10, 0)


class GroupedMM:
    """The products by torch's grouped product, for weights with aligned rows."""

    def for_microbatch(self) -> "GroupedMM":
        """The products of one microbatch, which may keep scales for its backward."""
        return self

    def fprop(self, x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, I], [E, O, I] -> [T, O]."""
        return self.multiply(x, weight.transpose(1, 2), offs=offs)

    def dgrad(self, grad: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [E, O, I] -> [T, I]."""
        return self.multiply(grad, weight, offs=offs)

    def wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [T, I] -> [E, O, I]; zero for experts without tokens."""
        grad_weight = self.multiply(grad.t(), x, offs=offs)
        capability = compute_capability(x.device)
        if capability is None or capability < _UNWRITTEN_FROM or self.is_looped(x):
            return grad_weight
        return _zero_without_tokens(grad_weight, offs)

    def accumulate_wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor, view: GradView) -> bool:
        """Write or add wgrad to the gradient buffer [E, O, I]; False if not possible now."""
        if has_wgrad_kernel(x):
            return accumulate_by_kernel(grad, x, offs=offs, view=view)
        if self.is_looped(x):
            return accumulate_each(grad, x, ends=offs.tolist(), view=view)
        target = view.start_write()
        if target is None:
            return False
        buffer, has_grads = target
        product = self.wgrad(grad, x, offs=offs)
        if has_grads:
            buffer += product
        else:
            buffer.copy_(product)
        return True

    def is_looped(self, x: Tensor) -> bool:
        """Whether each expert has a separate product."""
        # in 16 bit torch loops too, without padding; fp64 it refuses
        return x.device.type == "cpu" and x.itemsize != 4

    def multiply(self, a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        """[T, K], [E, K, N] -> [T, N], or [M, T], [T, N] -> [E, M, N], expert by expert."""
        # no tokens: torch's product on GPUs refuses most strides of an empty matrix
        if a.numel() == 0:
            if b.ndim == 2:
                return a.new_zeros(len(offs), len(a), b.shape[1])
            return a.new_zeros(len(a), b.shape[2])
        if self.is_looped(a):
            return multiply_each(a, b, offs=offs)
        out: Tensor = _grouped_mm(a, b, offs=offs)
        return out


class LoopedMM(GroupedMM):
    """One product per expert, for weights of any size; the host waits for `offs`."""

    def is_looped(self, x: Tensor) -> bool:
        """Always True: each expert has a separate product."""
        return True


def multiply_each(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """`GroupedMM.multiply` with one product per expert.

    In 16 bit on a CPU the number of tokens is padded to a multiple of `CPU_ROWS`.
    """
    ends = offs.tolist()
    unit = _row_unit(a)
    experts = tokens_of_experts(ends)
    products = []
    if b.ndim == 2:
        rows = a.t()
        for tokens in experts:
            products.append(_pad_to_unit(rows[tokens], unit).t() @ _pad_to_unit(b[tokens], unit))
        return torch.stack(products)
    for tokens, matrix in zip(experts, b, strict=True):
        product = _pad_to_unit(a[tokens], unit) @ matrix
        products.append(product[: tokens.stop - tokens.start])
    dropped = a.new_empty(len(a) - ends[-1], b.shape[2])
    return torch.cat([*products, dropped])


def accumulate_each(grad: Tensor, x: Tensor, *, ends: Sequence[int], view: GradView) -> bool:
    """Write dW = grad^T x of every expert to its part of the view, or add it.

    Args:
        grad: [T, O], sorted by expert.
        x: [T, I], sorted by expert.
        ends: [E] the end of each expert's tokens.
        view: [E, O, I].

    Returns:
        False if the view cannot be written now.
    """
    target = view.start_write()
    if target is None:
        return False
    buffer, has_grads = target
    unit = _row_unit(x)
    for tokens, matrix in zip(tokens_of_experts(ends), buffer, strict=True):
        expert_grad = _pad_to_unit(grad[tokens], unit)
        expert_x = _pad_to_unit(x[tokens], unit)
        write_wgrad(expert_grad, expert_x, out=matrix, adds=has_grads)
    return True


def has_wgrad_kernel(x: Tensor) -> bool:
    """Whether the weight gradients of tokens like `x` are written by this project's kernel.

    In fp32 tensor cores would round its inputs.
    """
    return x.itemsize == 2 and (x.is_meta or runs_triton(x))


def accumulate_by_kernel(grad: Tensor, x: Tensor, *, offs: Tensor, view: GradView) -> bool:
    """`accumulate_each` in one launch, without a host sync; `offs` is on the device."""
    target = view.start_write()
    if target is None:
        return False
    buffer, has_grads = target
    from nanotrain.kernels import triton_grouped_wgrad  # imports Triton

    operands = [grad.contiguous(), x.contiguous(), offs]
    triton_grouped_wgrad.write_grouped_wgrad(operands, buffer, adds=has_grads)
    return True


def matrix_ends(matrices: Tensor) -> Tensor:
    """[E] int32, the end of the rows of each matrix of [E, R, K]."""
    experts, rows, _ = matrices.shape
    return torch.arange(rows, experts * rows + 1, rows, dtype=torch.int32, device=matrices.device)


def tokens_of_experts(ends: Sequence[int]) -> list[slice]:
    """The tokens of each expert, from their ends."""
    starts = [0, *ends[:-1]]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]


def _row_unit(x: Tensor) -> int:
    """The number of tokens of a product is a multiple of this."""
    return CPU_ROWS if x.device.type == "cpu" and x.itemsize == 2 else 1


def _pad_to_unit(rows: Tensor, unit: int) -> Tensor:
    """[T, K] with rows of zeros up to a multiple of `unit`."""
    missing = -len(rows) % unit
    if not missing:
        return rows
    return F.pad(rows, (0, 0, 0, missing))


def select_gemm(weight: Tensor) -> GroupedMM:
    """torch's grouped product where the rows of a weight [E, O, I] are aligned in both dims.

    >>> [type(select_gemm(torch.empty(4, size, 64))).__name__ for size in (128, 23)]
    ['GroupedMM', 'LoopedMM']
    """
    row_bytes = [size * weight.itemsize for size in weight.shape[1:]]
    is_aligned = all(size % _ALIGNMENT_BYTES == 0 for size in row_bytes)
    return GroupedMM() if is_aligned else LoopedMM()


@dataclass(frozen=True)
class GroupedOptions:
    """Options of a grouped linear layer."""

    gemm: GroupedMM  # the products
    # whether there can be dropped tokens; their outputs and gradients are then zero
    may_drop: bool = False
    wgrad_queue: WgradQueue | None = None  # defers the weight gradient; None where no schedule does


def grouped_linear(
    x: Tensor, weight: nn.Parameter, *, offs: Tensor, options: GroupedOptions
) -> Tensor:
    """The tokens of each expert times the transposed weight of that expert.

    x [T, I], sorted by expert; weight [E, O, I]; offs [E] int32, the end of each expert's tokens ->
    [T, O].
    """
    # Inside of the function gradients are always off.
    options = replace(options, gemm=options.gemm.for_microbatch())
    out: Tensor = _GroupedLinear.apply(x, weight, offs, options)
    return out


class _GroupedLinear(torch.autograd.Function):
    """The products of all experts: x [T, K] and weight [E, N, K] -> [T, N]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, offs: Tensor, options: GroupedOptions
    ) -> Tensor:
        """Each row of x [T, K] times the weight of its expert; rows of expert e end at offs[e]."""
        ctx.save_for_backward(x, weight, offs)
        ctx.options = options
        ctx.param = weight
        out = options.gemm.fprop(x, weight, offs=offs)
        if options.may_drop:
            out = _zero_dropped(out, offs)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """dgrad now; wgrad now, or in the queue of a schedule with separate W actions."""
        x, weight, offs = ctx.saved_tensors
        options: GroupedOptions = ctx.options
        # an expanded gradient has strides that torch's product refuses
        grad = grads[0].contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = options.gemm.dgrad(grad, weight, offs=offs)
            if options.may_drop:
                grad_x = _zero_dropped(grad_x, offs)
        if ctx.needs_input_grad[1]:
            # x would keep its graph alive
            wgrad = _GroupedWgrad(ctx.param, options.gemm, grad, x.detach(), offs)
            if is_deferring(options.wgrad_queue):
                options.wgrad_queue.put(wgrad)
            else:
                (grad_weight,) = wgrad.compute()
        return grad_x, grad_weight, None, None


@dataclass(frozen=True)
class _GroupedWgrad:
    """The weight gradient of a grouped linear layer, still to be computed."""

    param: nn.Parameter
    gemm: GroupedMM
    grad: Tensor
    x: Tensor
    offs: Tensor

    @property
    def params(self) -> tuple[nn.Parameter]:
        """The parameters of a product: the stacked weight."""
        return (self.param,)

    def start(self) -> None:
        """Do nothing: the wgrad of experts communicates nothing."""

    def compute(self) -> tuple[Tensor | None]:
        """[E, O, I]; None if it was written to the gradient buffer."""
        view = grad_view_of(self.param)
        gemm = self.gemm
        if view is not None and gemm.accumulate_wgrad(self.grad, self.x, offs=self.offs, view=view):
            return (None,)
        return (self.gemm.wgrad(self.grad, self.x, offs=self.offs),)


def _zero_without_tokens(grads: Tensor, offs: Tensor) -> Tensor:
    """[E, O, I], zeros for experts without tokens, without a host sync."""
    is_empty = offs.diff(prepend=offs.new_zeros(1)) == 0
    return grads.masked_fill_(is_empty[:, None, None], 0)


def _zero_dropped(x: Tensor, offs: Tensor) -> Tensor:
    """Zeros after the last offset, without a host sync."""
    is_dropped = torch.arange(len(x), device=x.device) >= offs[-1]
    return x.masked_fill_(is_dropped[:, None], 0)
