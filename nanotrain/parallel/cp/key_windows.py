"""Windows of tokens that become compressed keys (attention/compressed.py), over cp.

forward     each chunk gets the tokens before it from the rank that holds them; a rank computes
            the compressed keys of the windows that end in its chunks, and all-gathers them
backward    the transpose of both

ChunkWindows         the windows that end in the chunks of a rank
with_tokens_before   the chunks of a rank as rows, each after the tokens before it
join_keys            the compressed keys of all ranks in the order of the sequence

B batch   C tokens of a chunk   L = 2 C   K windows of a chunk   T windows   D width of a key
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from nanotrain.attention.compressed import KeyWindows, WindowTokens, take_tokens
from nanotrain.attention.tiles import on_device
from nanotrain.comm.autograd import gather_along
from nanotrain.comm.group import Group
from nanotrain.parallel.cp.chunks import chunk_rows, join_rows, previous_tails
from nanotrain.parallel.cp.split import join_shards, zigzag_chunks

NUM_CHUNKS = 2  # of a rank


@dataclass(frozen=True)
class ChunkWindows:
    """The windows that end in the chunks of a rank; each chunk is a row of a batch."""

    tokens: WindowTokens  # their tokens in a row, which begins `num_before` tokens before the chunk
    num_before: int
    # [B or 1, T] int64: where each window of a sequence is among the windows of all chunks
    order: Tensor

    @classmethod
    def of(cls, windows: KeyWindows, group: Group, *, batch: int, num_series: int) -> Self:
        """The windows of a rank.

        Args:
            windows: the windows of full sequences.
            group: the cp group.
            batch: B.
            num_series: windows of tokens that a compressed key reads.
        """
        num_chunks = NUM_CHUNKS * group.size
        length = windows.length // num_chunks
        per_chunk = -(-length // windows.size)  # K
        num_before = num_series * windows.size - 1
        shape = (len(windows.last_tokens), num_chunks, per_chunk)
        # windows that do not exist read the last tokens of a chunk
        last_tokens = np.full(shape, num_before + length - 1)
        has_previous = np.zeros(shape, dtype=bool)
        order = np.zeros(windows.last_tokens.shape, dtype=np.int64)
        for row, last_of_row in enumerate(windows.last_tokens):
            for chunk in range(num_chunks):
                start = chunk * length
                ends_inside = (last_of_row >= start) & (last_of_row < start + length)
                found = np.flatnonzero(ends_inside)
                offsets = np.arange(len(found))
                last_tokens[row, chunk, offsets] = last_of_row[found] - start + num_before
                has_previous[row, chunk, offsets] = windows.has_previous[row, found]
                order[row, found] = chunk * per_chunk + offsets
        own = list(zigzag_chunks(group.index, group.size))
        repeats = batch // len(last_tokens)
        last_of_rows = np.tile(last_tokens[:, own], (repeats, 1, 1)).reshape(-1, per_chunk)
        previous = np.tile(has_previous[:, own], (repeats, 1, 1)).reshape(-1, per_chunk)
        device = windows.device
        first = on_device(last_of_rows - windows.size + 1, device)
        tokens = first[..., None] + torch.arange(windows.size, device=device)
        return cls(
            WindowTokens(tokens, on_device(previous, device)), num_before, on_device(order, device)
        )


def with_tokens_before(x: Tensor, group: Group, *, count: int) -> Tensor:
    """[B, L, E] -> [2 B, count + C, E], the chunks after the tokens before them.

    Zeros are before a sequence.
    """
    rows = chunk_rows(x, group)
    return torch.cat((previous_tails(rows, group, count=count), rows), dim=1)


def join_keys(keys: Tensor, windows: ChunkWindows, *, group: Group) -> Tensor:
    """Compressed keys [2 B, K, D] of each rank -> compressed keys of full sequences, [B, T, D]."""
    local = join_rows(keys, group)
    shards = gather_along(local[None], group, dim=0)
    return take_tokens(join_shards(shards), windows.order)
