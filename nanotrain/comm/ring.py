"""Pass tensors once around a group: everyone sends to the next member and receives from the one before.

    start_rotate   begins; compute with what is here meanwhile
    Rotating       what is on its way

A group of one gets its own tensors back. Bytes sent are booked in the group's ledger as "p2p".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.work import DONE, Work, watch


@dataclass(frozen=True)
class Rotating:
    """Tensors on their way from the member before.

    Args:
        arriving: undefined until `wait` has returned.
        pending: of the transfers in both directions.
    """

    arriving: tuple[Tensor, ...]
    pending: Work

    def wait(self) -> tuple[Tensor, ...]:
        """What the member before has sent; what was sent from here may then be overwritten."""
        self.pending.wait()
        return self.arriving


def start_rotate(tensors: Sequence[Tensor], group: Group) -> Rotating:
    """Begin to send `tensors` to the next member and to receive the like from the one before.

    Args:
        tensors: contiguous, of the same shapes and dtypes on every member; must not change before `wait`.
        group: whom to pass them around; members start the same rotations in the same order.

    Returns:
        what to wait on; from a group of one the tensors themselves come back.
    """
    if group.size == 1:
        return Rotating(tuple(tensors), DONE)
    assert all(tensor.is_contiguous() for tensor in tensors), "elements are sent in memory order"
    arriving = tuple(torch.empty_like(tensor) for tensor in tensors)
    group.traffic.record(group.name, "p2p", num_bytes=sum(tensor.nbytes for tensor in tensors))
    # One batch: on NCCL sends and receives of a pair must be launched together or both sides wait for the other.
    sends = [dist.P2POp(dist.isend, tensor, group.next, group=group.process_group) for tensor in tensors]
    receives = [dist.P2POp(dist.irecv, tensor, group.prev, group=group.process_group) for tensor in arriving]
    with watch("p2p", group):
        works = dist.batch_isend_irecv(sends + receives)
    return Rotating(arriving, Work("p2p", group, works=works, keep=(*tensors, *arriving)))
