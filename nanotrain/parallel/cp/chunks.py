"""Chunks of a sequence in order, for layers with a state or a halo.

Rank r of a context-parallel group holds chunks r and 2 * cp - 1 - r (split.py); a single rank holds
one chunk. Layers that read tokens in order compute the chunks as rows of a batch, and receive what
precedes each chunk from the rank that holds it:

    chunk     0   1   2   3   4   5   6   7
    cp rank   0 > 1 > 2 > 3 > 3 > 2 > 1 > 0

    chunk_rows       the chunks of local sequences as rows
    join_rows        inverse of it
    previous_tails   the last tokens before every chunk, from the neighbours
    chunk_segments   the segment ids of every chunk, and of tokens before it

    B batch   n chunks of a rank   C tokens of a chunk   L = n * C
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.comm.autograd import eager
from nanotrain.comm.group import Group
from nanotrain.comm.send_recv import Message, start_send_recv
from nanotrain.parallel.cp.split import zigzag_chunks


def num_chunks(group: Group) -> int:
    """Chunks of a sequence on one rank."""
    return 1 if group.size == 1 else 2


def chunk_rows(x: Tensor, group: Group) -> Tensor:
    """[B, L, ...] -> [B * n, C, ...], a view of contiguous tensors.

    The chunks of a sequence are adjacent rows.
    """
    chunks = x.unflatten(1, (num_chunks(group), -1))
    return chunks.flatten(0, 1)


def join_rows(rows: Tensor, group: Group) -> Tensor:
    """Inverse of `chunk_rows`: [B * n, C, ...] -> [B, L, ...]."""
    chunks = rows.unflatten(0, (-1, num_chunks(group)))
    return chunks.flatten(1, 2)


def previous_tails(rows: Tensor, group: Group, *, count: int) -> Tensor:
    """The last tokens before every chunk, differentiable; zeros before a sequence.

    Args:
        rows: [B * n, C, ...], the chunks of this rank.
        group: the cp group.
        count: tokens before each chunk, at most C.

    Returns:
        [B * n, count, ...].
    """
    num_rows, length, *shape = rows.shape
    if group.size == 1:
        return rows.new_zeros(num_rows, count, *shape)
    assert length >= count, "checked by the rules of layouts"
    tails = rows[:, length - count :]
    out: Tensor = _to_next_chunks(tails, group)
    return out


@eager  # transfers stay out of compiled graphs
def _to_next_chunks(tails: Tensor, group: Group) -> Tensor:
    out: Tensor = _NextChunks.apply(tails, group)
    return out


class _NextChunks(torch.autograd.Function):
    """Moves the ends of chunks to the chunks that follow; the backward moves gradients back."""

    @staticmethod
    def forward(ctx: Any, tails: Tensor, group: Group) -> Tensor:
        """[B * n, count, ...] last tokens of each chunk -> the tokens before each chunk."""
        ctx.group = group
        return _shift_chunks(tails, group, is_forward=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _shift_chunks(grads[0], ctx.group, is_forward=False), None


def _shift_chunks(rows: Tensor, group: Group, *, is_forward: bool) -> Tensor:
    """Move rows [B * n, ...] of every chunk to the next chunk, or to the previous one.

    Chunks without a source receive zeros.
    """
    first, second = rows.unflatten(0, (-1, 2)).unbind(1)
    first = first.contiguous()
    second = second.contiguous()
    new_first = torch.zeros_like(first)
    new_second = torch.zeros_like(second)

    # first chunks are in the order of the ranks, second chunks in the reverse order
    step = 1 if is_forward else -1
    after = group.index + step
    before = group.index - step
    sends = [Message(first, after), Message(second, before)]
    receives = [Message(new_first, before), Message(new_second, after)]
    started = start_send_recv(
        _with_existing_peer(sends, group), _with_existing_peer(receives, group), group=group
    )
    is_last = group.index == group.size - 1  # it holds both chunks in the middle of the sequence
    if is_last and is_forward:
        new_second.copy_(first)
    elif is_last:
        new_first.copy_(second)
    started.sent.wait()
    for work in started.received:
        work.wait()
    return torch.stack((new_first, new_second), dim=1).flatten(0, 1)


def _with_existing_peer(messages: Sequence[Message], group: Group) -> list[Message]:
    """The messages whose peer exists; the ends of a sequence have none."""
    return [message for message in messages if 0 <= message.peer < group.size]


def chunk_segments(segment_ids: Tensor, group: Group, *, before: int = 0) -> Tensor:
    """The segment ids of every chunk and of `before` tokens before it.

    Args:
        segment_ids: [B, S], segment ids of full sequences.
        group: the cp group.
        before: tokens before each chunk; their segment id is -1 before the sequence.

    Returns:
        [B * n, before + C].
    """
    padded = F.pad(segment_ids, (before, 0), value=-1)
    length = segment_ids.shape[1] // (group.size * num_chunks(group))
    numbers = (0,) if group.size == 1 else zigzag_chunks(group.index, group.size)
    chunks = []
    for chunk in numbers:
        start = chunk * length
        chunks.append(padded[:, start : start + length + before])
    return torch.stack(chunks, dim=1).flatten(0, 1)
