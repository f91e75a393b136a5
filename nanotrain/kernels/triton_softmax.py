"""Triton kernels of the vocabulary loss; they compute in fp32 from bf16, fp16 and fp32.

    row_logsumexp        one read of the logits
    softmax_gradient_    one read and one write, in place

Parameters of kernels are annotated as `tl.tensor`: Triton's compiler refuses other annotations.
Without the package `triton` the module has no kernels. With TRITON_INTERPRET=1, set before it is
imported, they run on CPU tensors, slowly.
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
    def _logsumexp(
        logits: tl.tensor, out: tl.tensor, num_columns: tl.tensor, block: tl.constexpr
    ) -> None:
        """The log-sum-exp of one row, in one pass with a running maximum."""
        row = tl.program_id(0).to(tl.int64)
        largest = -float("inf")
        total = 0.0
        for start in range(0, num_columns, block):
            columns = start + tl.arange(0, block)
            inside = columns < num_columns
            pointers = logits + row * num_columns + columns
            values = tl.load(pointers, mask=inside, other=-float("inf")).to(tl.float32)
            larger = tl.maximum(largest, tl.max(values, 0))
            added = tl.sum(tl.exp(values - larger), 0)
            total = total * tl.exp(largest - larger) + added
            largest = larger
        tl.store(out + row, largest + tl.log(total))

    @triton.jit
    def _softmax_gradient(
        logits: tl.tensor,
        logsumexp: tl.tensor,
        column: tl.tensor,
        local_mask: tl.tensor,
        scale: tl.tensor,
        num_columns: tl.tensor,
        block: tl.constexpr,
    ) -> None:
        """(softmax(logits) - one_hot(label)) * scale of one block of a row, in place."""
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * block + tl.arange(0, block)
        pointers = logits + row * num_columns + columns
        inside = columns < num_columns
        values = tl.load(pointers, mask=inside, other=-float("inf")).to(tl.float32)
        probability = tl.exp(values - tl.load(logsumexp + row))
        is_label = columns == tl.load(column + row)
        label = tl.where(is_label, tl.load(local_mask + row), 0.0)
        gradient = (probability - label) * tl.load(scale + row)
        tl.store(pointers, gradient.to(logits.dtype.element_ty), mask=inside)


def row_logsumexp(logits: Tensor) -> Tensor:
    """[t, V], contiguous -> [t, 1] fp32."""
    assert logits.is_contiguous(), "rows lie one after the other"
    out = torch.empty(logits.shape[0], 1, dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        _logsumexp[(logits.shape[0],)](logits, out, logits.shape[1], block=BLOCK)
    return out


def softmax_gradient_(
    logits: Tensor, *, logsumexp: Tensor, column: Tensor, local_mask: Tensor, scale: Tensor
) -> Tensor:
    """(exp(logits - logsumexp) - one-hot label) * scale, in the memory of the logits.

    Args:
        logits: [t, V], contiguous.
        logsumexp: [t, 1] fp32, over the vocabulary of all ranks.
        column: [t, 1] int64, position of the label.
        local_mask: [t, 1] fp32, 1 where the label is in these columns, else 0.
        scale: [t, 1] fp32, factors of the rows.
    """
    assert logits.is_contiguous(), "rows lie one after the other"
    tokens, columns = logits.shape
    if tokens:
        grid = (tokens, triton.cdiv(columns, BLOCK))
        _softmax_gradient[grid](
            logits,
            logsumexp.contiguous(),
            column.contiguous(),
            local_mask.contiguous(),
            scale.contiguous(),
            columns,
            block=BLOCK,
        )
    return logits
