"""Messages between two members of a group, started in batches.

    start_exchange      all sends and receives that a rank starts at one point

All of a batch run at once, so that two members may send to each other. NCCL runs the batches of a group one after
another, in the order in which they were started: batches of different ranks must be started in one order that all agree
on. gloo needs only that messages from one member to another are received in the order in which they were sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.pending import DONE, Pending, watch


@dataclass(frozen=True)
class Message:
    """One tensor on its way.

    Args:
        tensor: contiguous; what is sent, or where what arrives is written.
        member: index in the group of the rank it goes to or comes from.
    """

    tensor: Tensor
    member: int


def start_exchange(sends: Sequence[Message], receives: Sequence[Message], *, group: Group) -> Pending:
    """Begin to send and to receive; neither order nor number has to match among the members, only each pair's.

    Args:
        sends: must not change before `wait`.
        receives: of the shape and dtype that the other member sends.
        group: who takes part; a group of one has nobody to send to.

    Returns:
        what to wait on before a received tensor is read or a sent one is written.
    """
    if not sends and not receives:
        return DONE
    assert all(message.member != group.index for message in (*sends, *receives)), "gloo cannot send to itself"
    for message in sends:
        group.ledger.record(group.name, "p2p", num_bytes=message.tensor.nbytes)
    operations = [(dist.irecv, message) for message in receives] + [(dist.isend, message) for message in sends]
    batch = [
        dist.P2POp(start, message.tensor, group.ranks[message.member], group=group.process_group)
        for start, message in operations
    ]
    with watch("p2p", group):
        works = dist.batch_isend_irecv(batch)
    return Pending("p2p", group, works=works, keep=[message.tensor for _, message in operations])
