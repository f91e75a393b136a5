"""All-to-all: every member sends each other member rows of its own, as many as it likes.

    start_all_to_all   rows to their ranks, started; finished by `Pending.wait()`
    exchange           the same as a step of autograd: gradients travel back the way the rows came

    rank 0  [to 0 | to 1 to 1]   ->   [from 0 | from 1]
    rank 1  [to 0 | to 1]        ->   [from 0 from 0 | from 1]

Both sides must know the counts; who only knows what it sends learns the rest by an exchange of the counts. A group of
one answers with its input. The ledger books the rows that leave this rank as "all_to_all".
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.work import DONE, Work, watch


def start_all_to_all(
    output: Tensor, tensor: Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int], group: Group
) -> Work:
    """Begin to send rows of `tensor` to their members and to receive theirs in `output`.

    Args:
        output: [sum(receive_counts), ...], contiguous; member 0's rows first. Separate memory from `tensor`.
        tensor: [sum(send_counts), ...], contiguous, the same dtype; must not change before `wait`.
        send_counts: rows for each member, in the order of the group.
        receive_counts: rows from each member.
        group: who takes part.

    Returns:
        what to wait on before `output` is read.
    """
    assert len(send_counts) == len(receive_counts) == group.size, "every member has a count, this rank too"
    assert sum(send_counts) == len(tensor) and sum(receive_counts) == len(output), "rows would reach the wrong rank"
    assert output.dtype == tensor.dtype, f"{output.dtype} and {tensor.dtype}: bytes would be taken for other numbers"
    assert output.is_contiguous() and tensor.is_contiguous(), "rows are cut from memory, not from strides"
    if group.size == 1:
        output.copy_(tensor)
        return DONE
    leaving = sum(send_counts) - send_counts[group.index]
    row_bytes = tensor[:1].numel() * tensor.itemsize if len(tensor) else 0
    group.traffic.record(group.name, "all_to_all", num_bytes=leaving * row_bytes)
    with watch("all_to_all", group):
        work = dist.all_to_all_single(
            output,
            tensor,
            list(receive_counts),
            list(send_counts),
            group=group.process_group,
            async_op=True,
        )
    return Work("all_to_all", group, works=[work], keep=(output, tensor))


def exchange(x: Tensor, group: Group, *, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
    """Send rows of `x` to their members; the gradient of every row comes back to where the row came from.

    Args:
        x: [sum(send_counts), ...]; rows for member 0 first.
        group: who takes part.
        send_counts: rows for each member, in the order of the group.
        receive_counts: rows from each member.

    Returns:
        [sum(receive_counts), ...], member 0's rows first; `x` itself in a group of one.
    """
    if group.size == 1:
        return x
    out: Tensor = _Exchange.apply(x, group, tuple(send_counts), tuple(receive_counts))
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]
    ) -> Tensor:
        ctx.way_back = (group, receive_counts, send_counts)
        return _exchanged(x, group, send_counts=send_counts, receive_counts=receive_counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        group, send_counts, receive_counts = ctx.way_back
        grad = _exchanged(grads[0], group, send_counts=send_counts, receive_counts=receive_counts)
        return grad, None, None, None


def _exchanged(x: Tensor, group: Group, *, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
    output = x.new_empty((sum(receive_counts), *x.shape[1:]))
    start_all_to_all(output, x.contiguous(), send_counts=send_counts, receive_counts=receive_counts, group=group).wait()
    return output
