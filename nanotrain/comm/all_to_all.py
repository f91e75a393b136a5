"""All-to-all over dim 0, with even or uneven split sizes.

    start_all_to_all   asynchronous, into a given output
    all_to_all         differentiable; the backward swaps the two lists of split sizes
    start_differentiable_all_to_all      the same, waited for later, in the backward too; rows may
                       be encoded in fewer bytes
    start_reduce_scatter_by_all_to_all   reduce-scatter of a low-precision tensor with one rounding

    rank 0  [to 0 | to 1 to 1]   ->   [from 0 | from 1]
    rank 1  [to 0 | to 1]        ->   [from 0 from 0 | from 1]

Both sides need the split sizes; a rank that has only its input splits obtains the output splits by
an all-to-all of the input splits. In a group of one rank the output is the input. `group.traffic`
counts the rows sent to other ranks as "all_to_all".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.autograd import eager
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work, translate_errors


def start_all_to_all(
    output: Tensor,
    tensor: Tensor,
    *,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: Group,
) -> Work[Tensor]:
    """Start an all-to-all of the rows of `tensor`, as `torch.distributed.all_to_all_single`.

    Args:
        output: [sum(output_splits), ...], contiguous; the rows of rank 0 of the group first. Must
            not overlap `tensor`.
        tensor: [sum(input_splits), ...], contiguous, the dtype of `output`; must not change before
            `wait`.
        output_splits: number of rows received from each rank, in group order.
        input_splits: number of rows sent to each rank, in group order.

    Returns:
        A handle whose result is `output`.
    """
    assert len(input_splits) == len(output_splits) == group.size, (
        "one split size per rank of the group is needed"
    )
    assert sum(input_splits) == len(tensor) and sum(output_splits) == len(output), (
        "rows would reach the wrong rank"
    )
    assert output.dtype == tensor.dtype, (
        f"the bytes of {tensor.dtype} would be read as {output.dtype}"
    )
    assert output.is_contiguous() and tensor.is_contiguous(), (
        "rows are sent in memory order, not by strides"
    )
    if group.size == 1:
        output.copy_(tensor)
        return Work.completed(output)
    num_sent = sum(input_splits) - input_splits[group.index]
    row_bytes = tensor[:1].numel() * tensor.itemsize if len(tensor) else 0
    op = group.parent.op if group.parent else "all_to_all"
    group.record(op, num_bytes=num_sent * row_bytes)
    with translate_errors("all_to_all", group):
        handle = dist.all_to_all_single(
            output,
            tensor,
            group.all_splits(output_splits),
            group.all_splits(input_splits),
            group=group.process_group,
            async_op=True,
        )
    return Work(
        lambda: output, op="all_to_all", group=group, handles=[handle], keep=[output, tensor]
    )


@eager  # unlike the functions of autograd.py, whose collectives are operators of graphs
def all_to_all(
    x: Tensor, group: Group, *, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Tensor:
    """All-to-all with autograd: the gradient of a row returns to the rank that sent the row.

    [sum(input_splits), ...] -> [sum(output_splits), ...], as `start_all_to_all`; `x` itself in a
    group of one rank.
    """
    return start_differentiable_all_to_all(
        x, group, output_splits=output_splits, input_splits=input_splits
    ).wait()


@dataclass(frozen=True)
class Encoding:
    """Rows in fewer bytes while they are sent in the forward; gradients are sent as they are."""

    encode: Callable[[Tensor], Tensor]  # [R, H] -> [R, bytes] uint8
    # [R, bytes] uint8 and a tensor of the shape and dtype of the result -> [R, H]
    decode: Callable[[Tensor, Tensor], Tensor]


def start_differentiable_all_to_all(
    x: Tensor,
    group: Group,
    *,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    encoding: Encoding | None = None,
) -> Work[Tensor]:
    """Start `all_to_all`, to be waited for later.

    The work before `wait` overlaps with the transfer, and its backward with the transfer of the
    gradient, which starts where the gradient of the result is complete, and is waited for where the
    gradient of `x` is needed.
    """
    if group.size == 1:
        return Work.completed(x)
    transfer = _Transfer(group, output_splits, input_splits, encoding)
    output = _Start.apply(x, transfer)
    return Work(lambda: _Finish.apply(output, transfer))


@dataclass
class _Transfer:
    """One differentiable all-to-all: rows in the forward, gradients in the backward."""

    group: Group
    output_splits: Sequence[int]
    input_splits: Sequence[int]
    encoding: Encoding | None = None  # encoding of the forward; None: rows in their own dtype
    newest: Work[Tensor] = field(init=False)

    def start(self, x: Tensor, *, is_backward: bool = False) -> Tensor:
        """Start to send rows, or gradients back; returns the output, complete after `finish`."""
        received, sent = self.output_splits, self.input_splits
        rows = x
        if is_backward:
            received, sent = sent, received
        elif self.encoding is not None:
            rows = self.encoding.encode(x)
        output = rows.new_empty((sum(received), *rows.shape[1:]))
        splits = {"output_splits": received, "input_splits": sent}
        self.newest = start_all_to_all(output, rows.contiguous(), group=self.group, **splits)
        if rows is x:
            return output
        return x.new_empty(1).expand(sum(received), *x.shape[1:])  # the shape alone

    def receive(self, output: Tensor) -> Tensor:
        """Wait for the rows that `start` has returned before they were complete."""
        rows = self.finish()
        if self.encoding is None:
            return output.view_as(output)
        return self.encoding.decode(rows, output)

    def finish(self) -> Tensor:
        """Wait for the output and return it; another computation of this rank may run meanwhile."""
        work = self.newest
        del self.newest  # it would keep the rows until the backward
        self.group.turns.hand_over()
        return work.wait()


class _Start(torch.autograd.Function):
    """Starts the all-to-all; the backward waits for the gradients that `_Finish` started."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: _Transfer) -> Tensor:
        """Start the transfer of x."""
        ctx.transfer = transfer
        return transfer.start(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Wait for the gradient of x."""
        return ctx.transfer.finish(), None


class _Finish(torch.autograd.Function):
    """Waits for the all-to-all; the backward starts the all-to-all of the gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, transfer: _Transfer) -> Tensor:
        """Wait for the output."""
        ctx.transfer = transfer
        return transfer.receive(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Start the transfer of the gradient."""
        ctx.transfer.start(grads[0], is_backward=True)
        return grads[0], None  # only its shape counts: `_Start` returns what was received


def start_reduce_scatter_by_all_to_all(
    output: Tensor, tensor: Tensor, *, group: Group, op: str = "sum"
) -> Work[Tensor]:
    """Reduce-scatter as an all-to-all and a local fp32 sum, which is rounded once.

    The all-to-all sends the dtype of `tensor`.

    The reduce-scatter of NCCL rounds after every addition. Both send (d-1)/d of the tensor; this
    one receives into memory of the size of `tensor`. Source: Megatron-LM,
    `--reduce-scatter-with-fp32-accumulation`.

    Args:
        output: [n / size], contiguous; may be this rank's slice of `tensor`.
        tensor: [n], contiguous, the same dtype; must not change before `wait`, which computes the
            sum.
        group: group of the ranks.
        op: "sum" or "avg".
    """
    if group.size == 1:
        if output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor)
        return Work.completed(output)
    splits = [1] * group.size
    rows = tensor.view(group.size, -1)
    work = start_all_to_all(
        torch.empty_like(rows), rows, output_splits=splits, input_splits=splits, group=group
    )

    def finish(versions: Tensor) -> Tensor:
        total = versions.sum(0, dtype=torch.float32)
        if op == "avg":
            total.div_(group.size)
        return output.copy_(total)

    return work.then(finish)
