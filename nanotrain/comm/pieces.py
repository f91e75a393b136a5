"""All-gather and reduce-scatter in pieces, one per other rank, so that products run in between.

    start_shift    send a tensor to the rank at a distance, receive one from the other direction

A piece is an all-to-all of the group in which a rank sends to one rank: all ranks start the same
operations in the same order. `group.traffic` counts pieces as the collective that they make up.

    all-gather       distances 1, 2, ..      a rank receives the tensor of the rank at this distance
    reduce-scatter   distances -1, -2, ..    a rank sends the partial sum of the rank at -distance
"""

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.work import Work, translate_errors


def start_shift(tensor: Tensor, group: Group, *, distance: int, op: str) -> Work[Tensor]:
    """Start to receive the tensor of the rank at `distance` from this one, modulo the group's size.

    This rank sends its tensor to the rank at -`distance`.

    Args:
        tensor: contiguous, of one shape and dtype on all ranks; must not change before `wait`.
        group: a group of several ranks.
        distance: not a multiple of the group's size.
        op: the collective that the pieces make up, for the count of bytes.
    """
    assert distance % group.size, "gloo cannot send to the same rank"
    assert tensor.is_contiguous(), "bytes are sent in memory order"
    received = torch.empty_like(tensor)
    source = (group.index + distance) % group.size
    destination = (group.index - distance) % group.size
    group.record(op, num_bytes=tensor.nbytes)
    with translate_errors(op, group):
        handle = dist.all_to_all_single(
            received.view(-1),
            tensor.view(-1),
            _one_split(tensor.numel(), source, size=group.size),
            _one_split(tensor.numel(), destination, size=group.size),
            group=group.process_group,
            async_op=True,
        )
    return Work(lambda: received, op=op, group=group, handles=[handle], keep=[received, tensor])


def _one_split(numel: int, index: int, *, size: int) -> list[int]:
    """Split sizes with all elements at one rank."""
    splits = [0] * size
    splits[index] = numel
    return splits
