"""Which positions of a sequence a rank of `cp` holds: the zigzag, and the batch cut along it.

A sequence is cut into 2 * cp equal chunks and rank r holds the r-th from either end, so that every rank sees equally
many keys under a causal mask:

    chunk     0   1   2   3   4   5   6   7
    cp rank   0   1   2   3   3   2   1   0

    zigzag_chunks     pure: the two chunks of a rank
    own_chunks        a rank's chunks of a tensor, in ascending order
    natural_order     what all ranks hold, put back in the order of the sequence
    split_batch       the microbatch as this rank sees it
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.data.batch import Batch


@dataclass(frozen=True)
class Chunks:
    """Numbers of the two chunks that a rank holds, early < late."""

    early: int
    late: int


def zigzag_chunks(index: int, size: int) -> Chunks:
    """The chunks of member `index` of a cp group of `size`.

    >>> [zigzag_chunks(index, 2) for index in range(2)]
    [Chunks(early=0, late=3), Chunks(early=1, late=2)]
    """
    return Chunks(index, 2 * size - 1 - index)


def own_chunks(tensor: Tensor, *, index: int, size: int, dim: int = 1) -> Tensor:
    """What member `index` holds of `tensor`, whose `dim` is the whole sequence."""
    assert tensor.shape[dim] % (2 * size) == 0, f"{tensor.shape[dim]} positions do not make {2 * size} equal chunks"
    chunks, own = tensor.chunk(2 * size, dim=dim), zigzag_chunks(index, size)
    return torch.cat((chunks[own.early], chunks[own.late]), dim=dim)


def natural_order(pieces: Tensor) -> Tensor:
    """Put the pieces of all members in the order of the sequence.

    Args:
        pieces: [cp, B, S / cp, ...], member by member.

    Returns:
        [B, S, ...].
    """
    early, late = pieces.chunk(2, dim=2)
    return torch.cat((*early.unbind(), *late.flip(0).unbind()), dim=1)


def zigzag_order(whole: Tensor, *, size: int) -> Tensor:
    """Undo `natural_order`: [B, S, ...] -> [cp, B, S / cp, ...]."""
    return torch.stack([own_chunks(whole, index=index, size=size) for index in range(size)])


def split_batch(batch: Batch, group: Group) -> Batch:
    """The microbatch with this rank's part of every sequence; a group of one gets it back as it is.

    Args:
        batch: whole sequences, the same on every rank of the group.
        group: cp.

    Returns:
        tokens, labels, loss_mask [B, S / cp]; position_ids always given, [1, S / cp] where the batch has none;
        document_ids stay [B, S]: a query must know the document of keys that other ranks hold.
    """
    if group.size == 1:
        return batch

    def own(tensor: Tensor) -> Tensor:
        return own_chunks(tensor, index=group.index, size=group.size)

    places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
    positions = places if batch.position_ids is None else batch.position_ids
    return replace(
        batch,
        tokens=own(batch.tokens),
        labels=own(batch.labels),
        loss_mask=own(batch.loss_mask),
        position_ids=own(positions),
        places=own(places)[0],
    )
