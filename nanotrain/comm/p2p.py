"""Messages between members of a group, started in batches.

    Message          a tensor and the member it goes to or comes from
    start_messages   all sends and receives that a rank starts at one point
    OnTheWay         what to wait for

All of a batch run at once, so that two members may send to each other. NCCL runs the batches of a group one after
another, in the order in which they were started: members must start what they exchange in one order that all agree on.
gloo asks only that messages from one member to another are received in the order in which they are sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.work import DONE, Work, watch


@dataclass(frozen=True)
class Message:
    """One tensor on its way.

    Args:
        tensor: contiguous; what is sent, or where what arrives is written.
        member: index in the group of the rank it goes to or comes from.
    """

    tensor: Tensor
    member: int


@dataclass(frozen=True)
class OnTheWay:
    """A batch of messages that was started.

    Args:
        sent: wait on it before a sent tensor is written.
        received: wait on each before that message is read.
    """

    sent: Work
    received: tuple[Work, ...]


def start_messages(sends: Sequence[Message], receives: Sequence[Message], *, group: Group) -> OnTheWay:
    """Begin to send and to receive. Bytes sent are booked in the group's ledger as "p2p".

    Args:
        sends: must not change before they are waited for.
        receives: of the shape and dtype that the other member sends.
        group: whose members they are; nobody sends to itself.
    """
    assert all(message.member != group.index for message in (*sends, *receives)), "gloo cannot send to itself"
    assert all(message.tensor.is_contiguous() for message in (*sends, *receives)), "bytes travel in memory order"
    if not sends and not receives:
        return OnTheWay(DONE, ())
    for message in sends:
        group.traffic.record(group.name, "p2p", num_bytes=message.tensor.nbytes)
    batch = [_operation(dist.irecv, message, group=group) for message in receives]
    batch += [_operation(dist.isend, message, group=group) for message in sends]
    with watch("p2p", group):
        works = dist.batch_isend_irecv(batch)
    if len(works) != len(batch):  # NCCL has one handle for all, gloo one for each
        works = works * len(batch)

    def pending(messages: Sequence[Message], handles: Sequence[dist.Work]) -> Work:
        return Work("p2p", group, works=handles, keep=[message.tensor for message in messages])

    received = zip(receives, works, strict=False)
    return OnTheWay(
        sent=pending(sends, works[len(receives) :]),
        received=tuple(pending([message], [work]) for message, work in received),
    )


def _operation(start: Callable[..., object], message: Message, *, group: Group) -> dist.P2POp:
    return dist.P2POp(start, message.tensor, group.ranks[message.member], group=group.process_group)
