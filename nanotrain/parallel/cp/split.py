"""Zigzag sharding of sequences over a context-parallel group.

A sequence is split into 2 * cp equal chunks. Rank r holds chunks r and 2 * cp - 1 - r, so that
causal attention costs every rank the same:

    chunk     0   1   2   3   4   5   6   7
    cp rank   0   1   2   3   3   2   1   0

    zigzag_chunks     the two chunk numbers of a rank
    local_chunks      the shard of a tensor
    local_positions   the positions of a rank's tokens in their sequence
    stack_shards      full sequences -> the shards of all ranks
    join_shards       the shards of all ranks -> full sequences
    split_batch       the shard of a microbatch
"""

from dataclasses import replace

import torch
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.data.batch import Batch


def zigzag_chunks(index: int, size: int) -> tuple[int, int]:
    """The two chunks of rank `index` of a cp group of `size` ranks, in the order of the sequence.

    >>> [zigzag_chunks(index, 2) for index in range(2)]
    [(0, 3), (1, 2)]
    """
    return index, 2 * size - 1 - index


def local_chunks(tensor: Tensor, *, index: int, size: int, dim: int = 1) -> Tensor:
    """The shard of rank `index` of a tensor whose dim `dim` is the full sequence."""
    assert tensor.shape[dim] % (2 * size) == 0, (
        f"{tensor.shape[dim]} positions do not make {2 * size} equal chunks"
    )
    chunks = tensor.chunk(2 * size, dim=dim)
    first, second = zigzag_chunks(index, size)
    return torch.cat((chunks[first], chunks[second]), dim=dim)


def local_positions(
    length: int, *, index: int, size: int, device: torch.device | None = None
) -> Tensor:
    """[length / size] int64: the positions of the tokens of rank `index` in their sequence.

    >>> local_positions(8, index=0, size=2).tolist()
    [0, 1, 6, 7]
    """
    positions = torch.arange(length, device=device)
    return local_chunks(positions, index=index, size=size, dim=0)


def stack_shards(tensor: Tensor, *, size: int) -> Tensor:
    """Shard full sequences for all ranks: [B, S, ...] -> [cp, B, S / cp, ...]."""
    shards = [local_chunks(tensor, index=index, size=size) for index in range(size)]
    return torch.stack(shards)


def join_shards(shards: Tensor) -> Tensor:
    """Inverse of `stack_shards`: [cp, B, S / cp, ...] -> [B, S, ...]."""
    first, second = shards.chunk(2, dim=2)
    return torch.cat((*first.unbind(), *reversed(second.unbind())), dim=1)


def split_batch(batch: Batch, group: Group) -> Batch:
    """Shard a microbatch of full sequences over the cp group.

    In a group of one rank the microbatch is returned unchanged.

    Returns:
        tokens, labels and loss_mask [B, S / cp], in `mtp` too; position_ids [B, S / cp], or
        [1, S / cp] if the batch has none; segment_ids stay [B, S], since the mask needs the
        segments of keys on other ranks.
    """
    if group.size == 1:
        return batch

    def local(tensor: Tensor) -> Tensor:
        return local_chunks(tensor, index=group.index, size=group.size)

    def local_tokens(full: Batch) -> Batch:
        return replace(
            full,
            tokens=local(full.tokens),
            labels=local(full.labels),
            loss_mask=local(full.loss_mask),
        )

    if batch.position_ids is None:
        length = batch.tokens.shape[1]
        positions = torch.arange(length, device=batch.tokens.device)[None]
    else:
        positions = batch.position_ids
    mtp = tuple(local_tokens(depth) for depth in batch.mtp)
    return replace(local_tokens(batch), position_ids=local(positions), mtp=mtp)
