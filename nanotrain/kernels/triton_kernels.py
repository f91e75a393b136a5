"""Triton kernels; each computes in fp32 from any of `choice.DTYPES`.

    row_logsumexp, softmax_gradient_    the vocabulary loss: one read of the logits, then one read and write in place
    swiglu_forward, swiglu_backward     silu(gate) * up, of rows at any distance

Parameters of kernels are annotated as `tl.tensor`: Triton's compiler refuses annotations that are not its own.
Without the package `triton` the module has no kernels. With TRITON_INTERPRET=1, set before it is imported, they run on
CPU tensors, slowly.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK = 4096  # elements that a program handles at once


if triton is not None:

    @triton.jit
    def _logsumexp(logits: tl.tensor, out: tl.tensor, num_columns: tl.tensor, block: tl.constexpr) -> None:
        row = tl.program_id(0).to(tl.int64)
        largest, total = -float("inf"), 0.0
        for start in range(0, num_columns, block):
            columns = start + tl.arange(0, block)
            values = tl.load(logits + row * num_columns + columns, mask=columns < num_columns, other=-float("inf"))
            values = values.to(tl.float32)
            larger = tl.maximum(largest, tl.max(values, 0))
            total = total * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger), 0)
            largest = larger
        tl.store(out + row, largest + tl.log(total))

    @triton.jit
    def _softmax_gradient(
        logits: tl.tensor,
        logsumexp: tl.tensor,
        column: tl.tensor,
        is_local: tl.tensor,
        num_columns: tl.tensor,
        block: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * block + tl.arange(0, block)
        place, inside = logits + row * num_columns + columns, columns < num_columns
        values = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
        label = tl.where(columns == tl.load(column + row), tl.load(is_local + row), 0.0)
        gradient = tl.exp(values - tl.load(logsumexp + row)) - label
        tl.store(place, gradient.to(logits.dtype.element_ty), mask=inside)

    @triton.jit
    def _swiglu_forward(
        gate: tl.tensor,
        up: tl.tensor,
        out: tl.tensor,
        gate_row: tl.tensor,
        up_row: tl.tensor,
        num_columns: tl.tensor,
        block: tl.constexpr,
    ) -> None:
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
        inside = column < num_columns
        g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
        target = out + row * num_columns + column
        tl.store(target, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _swiglu_backward(
        grad: tl.tensor,
        gate: tl.tensor,
        up: tl.tensor,
        grad_gate: tl.tensor,
        grad_up: tl.tensor,
        grad_row: tl.tensor,
        gate_row: tl.tensor,
        up_row: tl.tensor,
        grad_gate_row: tl.tensor,
        grad_up_row: tl.tensor,
        num_columns: tl.tensor,
        block: tl.constexpr,
    ) -> None:
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
        inside = column < num_columns
        dy = tl.load(grad + row * grad_row + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(g)
        dg = dy * u * sigmoid * (1 + g * (1 - sigmoid))
        tl.store(grad_gate + row * grad_gate_row + column, dg.to(grad_gate.dtype.element_ty), mask=inside)
        du = dy * g * sigmoid
        tl.store(grad_up + row * grad_up_row + column, du.to(grad_up.dtype.element_ty), mask=inside)


def row_logsumexp(logits: Tensor) -> Tensor:
    """[t, V], contiguous -> [t, 1] fp32."""
    assert logits.is_contiguous(), "rows lie one after the other"
    out = torch.empty(logits.shape[0], 1, dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        _logsumexp[(logits.shape[0],)](logits, out, logits.shape[1], block=BLOCK)
    return out


def softmax_gradient_(logits: Tensor, *, logsumexp: Tensor, column: Tensor, is_local: Tensor) -> Tensor:
    """exp(logits - logsumexp) - one-hot label, in the memory of the logits.

    Args:
        logits: [t, V], contiguous.
        logsumexp: [t, 1] fp32, over the vocabulary of all ranks.
        column: [t, 1] int64, position of the label.
        is_local: [t, 1] fp32, 1 where the label is in these columns, else 0.
    """
    assert logits.is_contiguous(), "rows lie one after the other"
    tokens, columns = logits.shape
    if tokens:
        grid = (tokens, triton.cdiv(columns, BLOCK))
        arguments = (logsumexp.contiguous(), column.contiguous(), is_local.contiguous(), columns)
        _softmax_gradient[grid](logits, *arguments, block=BLOCK)
    return logits


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of tensors [..., size] of one dtype; rows may have any distance, as slices of a wider tensor."""
    out, rows = gate.new_empty(gate.shape), [_rows(gate), _rows(up)]
    if gate.numel():
        grid, block = _columns(gate)
        _swiglu_forward[grid](*rows, out, *(row.stride(0) for row in rows), gate.shape[-1], block=block)
    return out


def swiglu_backward(grad: Tensor, *, gate: Tensor, up: Tensor, out: tuple[Tensor, Tensor]) -> None:
    """Write the gradients of gate and up [..., size] to `out`; rows may have any distance."""
    rows = [_rows(grad), _rows(gate), _rows(up), *(each.view(-1, each.shape[-1]) for each in out)]
    if gate.numel():
        grid, block = _columns(gate)
        _swiglu_backward[grid](*rows, *(row.stride(0) for row in rows), gate.shape[-1], block=block)


def _rows(x: Tensor) -> Tensor:
    """[..., size] -> [rows, size], a copy only where elements of a row or rows are not evenly apart."""
    return (x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, x.shape[-1])


def _columns(x: Tensor) -> tuple[tuple[int, int], int]:
    """The grid of programs, one per row and block of columns, and the elements of a block."""
    size = x.shape[-1]
    block = min(BLOCK, triton.next_power_of_2(size))
    return (x.numel() // size, triton.cdiv(size, block)), block
