"""Point-to-point messages inside a group, in batches.

    Message               a tensor, and the peer that it is sent to or received from
    start_send_recv       start several sends and receives as one batch
    SendRecv              the handles of such a batch
    start_ring_send_recv  send to the next rank of the group, receive from the previous one

The messages of a batch run concurrently, so two ranks may send to each other. NCCL runs the batches
of a group one after another, in the order in which they were started: all ranks must start matching
batches in the same order. gloo only needs the messages of a pair to be received in the order in
which they are sent. `group.traffic` counts sent bytes as "p2p".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.work import Work, translate_errors


@dataclass(frozen=True)
class Message:
    """One tensor to send or to receive."""

    tensor: Tensor  # contiguous; the tensor to send, or the memory to receive into
    peer: int  # index in the group of the destination or source


@dataclass(frozen=True)
class SendRecv:
    """The handles of a batch of messages."""

    sent: Work[None]  # complete when all sent tensors may be overwritten
    # one handle per receive, in the given order; its result is the received tensor
    received: tuple[Work[Tensor], ...]


def start_send_recv(
    sends: Sequence[Message], receives: Sequence[Message], *, group: Group
) -> SendRecv:
    """Start a batch of sends and receives; no rank sends to itself.

    Args:
        sends: tensors that must not change before `sent.wait()`.
        receives: tensors of the shape and dtype that the peer sends.
    """
    for message in (*sends, *receives):
        assert message.peer != group.index, "gloo cannot send to the same rank"
        assert message.tensor.is_contiguous(), "bytes are sent in memory order"
    if not sends and not receives:
        return SendRecv(Work.completed(None), ())
    for message in sends:
        group.record("p2p", num_bytes=message.tensor.nbytes)
    batch = [_operation(dist.irecv, message, group=group) for message in receives]
    batch += [_operation(dist.isend, message, group=group) for message in sends]
    with translate_errors("p2p", group):
        handles = dist.batch_isend_irecv(batch)
    if len(handles) != len(batch):  # NCCL returns one handle for the batch, gloo one per message
        handles = handles * len(batch)
    keep = [message.tensor for message in sends]
    sent = Work(lambda: None, op="p2p", group=group, handles=handles[len(receives) :], keep=keep)
    received = []
    for message, handle in zip(receives, handles, strict=False):
        received.append(_receive(message, handle, group=group))
    return SendRecv(sent, tuple(received))


def start_ring_send_recv(tensors: Sequence[Tensor], group: Group) -> Work[tuple[Tensor, ...]]:
    """Start to send `tensors` to the next rank of the group and to receive the previous rank's.

    Args:
        tensors: contiguous, of the same shapes and dtypes on every rank; must not change before
            `wait`.
        group: the ring; all ranks start the same calls in the same order.

    Returns:
        A handle whose result are the previous rank's tensors; in a group of one rank, `tensors`
        themselves.
    """
    if group.size == 1:
        return Work.completed(tuple(tensors))
    received = tuple(torch.empty_like(tensor) for tensor in tensors)
    next_index = (group.index + 1) % group.size
    prev_index = (group.index - 1) % group.size
    started = start_send_recv(
        [Message(tensor, next_index) for tensor in tensors],
        [Message(tensor, prev_index) for tensor in received],
        group=group,
    )

    def finish() -> tuple[Tensor, ...]:
        started.sent.wait()
        return tuple(work.wait() for work in started.received)

    return Work(finish)


def _operation(start: Callable[..., object], message: Message, *, group: Group) -> dist.P2POp:
    return dist.P2POp(start, message.tensor, group.ranks[message.peer], group=group.process_group)


def _receive(message: Message, handle: dist.Work, *, group: Group) -> Work[Tensor]:
    """The work of a message that is being received."""
    peer = group.ranks[message.peer]
    tensor = message.tensor
    return Work(lambda: tensor, op="p2p", group=group, handles=[handle], keep=[tensor], peer=peer)
