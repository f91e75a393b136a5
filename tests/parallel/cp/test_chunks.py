"""The chunks of a sequence in order: rows and back, the tokens before each with gradients, borders
of documents.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.parallel.cp.chunks import chunk_rows, chunk_segments, join_rows, previous_tails
from nanotrain.parallel.cp.split import local_chunks, zigzag_chunks
from tests.harness import ranks

LENGTH, COUNT = 24, 2


def rank_of(index: int, size: int) -> Any:
    """A rank of a group that communicates nothing."""
    return SimpleNamespace(index=index, size=size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_are_the_local_chunks_and_join(size: int) -> None:
    full = torch.arange(2 * LENGTH * 3).view(2, LENGTH, 3)
    for index in range(size):
        group = rank_of(index, size)
        local = full if size == 1 else local_chunks(full, index=index, size=size)
        rows = chunk_rows(local, group)
        numbers = (0,) if size == 1 else zigzag_chunks(index, size)
        chunks = full.chunk(1 if size == 1 else 2 * size, dim=1)
        assert torch.equal(rows, torch.stack([chunks[n] for n in numbers], dim=1).flatten(0, 1))
        assert torch.equal(join_rows(rows, group), local)


@ranks(3, cp=3, shares=True)
def test_tokens_before_every_chunk_come_from_the_neighbours_and_their_gradients_go_back(
    ctx,
) -> None:
    group = ctx.group("cp")
    full = torch.randn(
        2, LENGTH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    weight = torch.randn(
        2, LENGTH + COUNT, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    chunk = LENGTH // 6
    local = local_chunks(full, index=group.index, size=3).requires_grad_()
    ctx.traffic.reset()

    tails = previous_tails(chunk_rows(local, group), group, count=COUNT)

    padded = torch.cat((torch.zeros(2, COUNT, 4, dtype=torch.float64), full), dim=1)
    numbers = zigzag_chunks(group.index, 3)
    expected = torch.stack(
        [padded[:, n * chunk : n * chunk + COUNT] for n in numbers], dim=1
    ).flatten(0, 1)
    assert torch.equal(tails, expected)
    num_neighbours = (group.index > 0) + (group.index < 2)
    assert ctx.traffic.bytes("cp", "p2p") == num_neighbours * tails.nbytes // 2
    # the last tokens of a chunk are multiplied by the weights of the tokens before the next one
    of_chunks = torch.stack(
        [weight[:, n * chunk : n * chunk + COUNT] for n in numbers], dim=1
    ).flatten(0, 1)
    tails.backward(of_chunks)
    grad = torch.zeros(2, LENGTH + COUNT, 4, dtype=torch.float64)
    for number in range(1, 6):
        places = slice(number * chunk, number * chunk + COUNT)
        grad[:, places] += weight[:, places]
    assert torch.equal(local.grad, local_chunks(grad[:, COUNT:], index=group.index, size=3))


def test_segments_of_a_chunk_and_of_the_tokens_before_it() -> None:
    segments = torch.arange(8)[None]
    assert chunk_segments(segments, rank_of(1, 2), before=3).tolist() == [
        [-1, 0, 1, 2, 3],
        [1, 2, 3, 4, 5],
    ]
    assert chunk_segments(segments, Group.single_rank("cp")).tolist() == [list(range(8))]
