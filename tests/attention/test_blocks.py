"""Blocks of keys: where they begin, their scores, and the ones that are selected."""

import pytest
import torch
from torch import Tensor

from nanotrain.attention.blocks import BlockScores, KeyBlocks
from nanotrain.attention.call import AttentionCall, TileKernel
from nanotrain.attention.tiles import Spans

SEGMENTS = torch.tensor([[0] * 5 + [1] * 4, [0] * 9])


def call_of(queries: range, segment_ids: Tensor | None = None) -> AttentionCall:
    spans = Spans.of(segment_ids, length=9)
    return AttentionCall(TileKernel(), spans, queries, torch.device("cpu"))


def test_documents_begin_blocks() -> None:
    call = call_of(range(9), SEGMENTS)
    blocks = KeyBlocks.of(call, 3)
    assert blocks.numbers.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 3], [0, 0, 0, 1, 1, 1, 2, 2, 2]]
    assert blocks.first_keys.tolist() == [[0, 3, 5, 8], [0, 3, 6, 9]]
    assert blocks.is_key.sum(-1).tolist() == [[3, 2, 3, 1], [3, 3, 3, 0]]
    assert [blocks.num_before(query) for query in (2, 5, 8)] == [1, 3, 4]
    assert KeyBlocks.of(call, 3) is blocks, "planned once"
    may_attend = blocks.may_attend(torch.tensor([6]), 4)
    assert may_attend.sum(-1).tolist() == [[[0, 0, 2, 0]], [[3, 3, 1, 0]]]


def test_rows_of_keys_come_into_the_slots_of_their_blocks() -> None:
    keys = torch.arange(18.0).view(2, 9, 1)
    blocks = KeyBlocks.of(call_of(range(9), SEGMENTS), 3)
    slots = blocks.to_slots(keys, 4).view(2, 4, 3)
    assert slots[blocks.is_key].tolist() == list(range(18))


def scores_of(products: list[list[float]], may_attend: list[bool]) -> BlockScores:
    """The scores of one query with an index of one channel, in blocks of one key."""
    slots = torch.tensor(products)[..., None]
    mask = torch.tensor(may_attend)[None, None, :, None]
    return BlockScores.of(torch.ones(1, 1, 1, 1), slots, may_attend=mask)


@pytest.mark.parametrize(
    ("num_local", "expected"),
    [(0, [1, 0, 1, 0, 0, 0]), (1, [1, 0, 0, 0, 1, 0]), (2, [0, 0, 0, 1, 1, 0])],
)
def test_the_blocks_before_a_query_are_among_the_highest(
    num_local: int, expected: list[int]
) -> None:
    scores = scores_of([[2.0, 1.0, 2.0, 0.0, -3.0, 9.0]], [True] * 5 + [False])
    distances = torch.tensor([[[4, 3, 2, 1, 0, -1]]])
    selected = scores.select(distances, topk=2, num_local=num_local)
    assert selected[0, 0, 0].int().tolist() == expected


def test_fewer_blocks_than_may_be_selected_are_all_selected() -> None:
    scores = scores_of([[0.0, 1.0, 2.0]], [True, True, False])
    distances = torch.tensor([[[1, 0, -1]]])
    for topk in (2, 3, 9):
        selected = scores.select(distances, topk=topk, num_local=1)
        assert selected[0, 0, 0].tolist() == [True, True, False]
