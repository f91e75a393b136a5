"""The chunks of a sequence that a rank holds, in the order of the sequence: for layers with a state
or a halo.

Rank r of a context-parallel group holds chunks r and 2 * cp - 1 - r (split.py); a single rank holds
one chunk. Layers that read tokens in order compute the chunks side by side, as rows of a batch, and
get what is before each from its rank:

    chunk     0   1   2   3   4   5   6   7
    cp rank   0 > 1 > 2 > 3 > 3 > 2 > 1 > 0

    chunk_rows       the chunks of local sequences as rows
    join_rows        inverse of it
    previous_tails   the last tokens before every chunk, from the neighbours
    chunk_segments   the segment ids of every chunk, and of tokens before it

    B batch   n chunks of a rank   C tokens of a chunk   L = n * C
"""

from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.autograd import eager
from nanotrain.comm.group import Group
from nanotrain.comm.send_recv import Message, start_send_recv
from nanotrain.parallel.cp.split import zigzag_chunks


def num_chunks(group: Group) -> int:
    """Chunks of a sequence on one rank."""
    return 1 if group.size == 1 else 2


def chunk_rows(x: Tensor, group: Group) -> Tensor:
    """[B, L, ...] -> [B * n, C, ...], a view of contiguous tensors; the chunks of a sequence are
    adjacent rows.
    """
    return x.unflatten(1, (num_chunks(group), -1)).flatten(0, 1)


def join_rows(rows: Tensor, group: Group) -> Tensor:
    """Inverse of `chunk_rows`: [B * n, C, ...] -> [B, L, ...]."""
    return rows.unflatten(0, (-1, num_chunks(group))).flatten(1, 2)


def previous_tails(rows: Tensor, group: Group, *, count: int) -> Tensor:
    """The last tokens before every chunk, differentiable; zeros before a sequence.

    Args:
        rows: [B * n, C, ...], the chunks of this rank.
        group: the cp group.
        count: tokens before each chunk, at most C.

    Returns:
        [B * n, count, ...].
    """
    if group.size == 1:
        return rows.new_zeros(rows.shape[0], count, *rows.shape[2:])
    assert rows.shape[1] >= count, "checked by the rules of layouts"
    out: Tensor = _to_next_chunks(rows[:, rows.shape[1] - count :], group)
    return out


@eager  # transfers stay out of compiled graphs
def _to_next_chunks(tails: Tensor, group: Group) -> Tensor:
    out: Tensor = _NextChunks.apply(tails, group)
    return out


class _NextChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tails: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _shift(tails, group, is_forward=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _shift(grads[0], ctx.group, is_forward=False), None


def _shift(rows: Tensor, group: Group, *, is_forward: bool) -> Tensor:
    """Rows [B * n, ...] of every chunk to the rank of the next chunk, or of the previous one; zeros
    at the end.
    """
    first, second = (x.contiguous() for x in rows.unflatten(0, (-1, 2)).unbind(1))
    out = torch.zeros_like(first), torch.zeros_like(second)
    index, last = group.index, group.size - 1
    # the first chunks of the ranks are in their order, the second ones in the reverse order
    sent, received = (first, second), out
    step = 1 if is_forward else -1
    sends = [
        Message(x, peer)
        for x, peer in zip(sent, (index + step, index - step), strict=True)
        if 0 <= peer <= last
    ]
    receives = [
        Message(x, peer)
        for x, peer in zip(received, (index - step, index + step), strict=True)
        if 0 <= peer <= last
    ]
    started = start_send_recv(sends, receives, group=group)
    if index == last:  # both chunks in the middle of the sequence are on the last rank
        out[is_forward].copy_((second, first)[is_forward])
    started.sent.wait()
    for work in started.received:
        work.wait()
    return torch.stack(out, dim=1).flatten(0, 1)


def chunk_segments(segment_ids: Tensor, group: Group, *, before: int = 0) -> Tensor:
    """The segment ids of every chunk, and of so many tokens before it.

    Args:
        segment_ids: [B, S], of full sequences.
        group: the cp group.
        before: tokens before each chunk; their segment id is -1 before the sequence.

    Returns:
        [B * n, before + C].
    """
    padded = torch.nn.functional.pad(segment_ids, (before, 0), value=-1)
    length = segment_ids.shape[1] // (group.size * num_chunks(group))
    numbers = (0,) if group.size == 1 else zigzag_chunks(group.index, group.size)
    chunks = [padded[:, number * length : (number + 1) * length + before] for number in numbers]
    return torch.stack(chunks, dim=1).flatten(0, 1)
