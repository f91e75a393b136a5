"""The zigzag holds every position once, in order, and comes back whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.comm.group import Group
from nanotrain.data.batch import Batch
from nanotrain.parallel.cp.split import natural_order, own_chunks, split_batch, zigzag_chunks, zigzag_order
from tests.harness import ranks

SIZES = st.integers(1, 9)


@given(SIZES)
def test_every_chunk_has_one_owner_and_all_owners_equally_much_to_see(size):
    owned = [zigzag_chunks(index, size) for index in range(size)]
    assert sorted(n for chunks in owned for n in (chunks.early, chunks.late)) == list(range(2 * size))
    assert {chunks.early + chunks.late for chunks in owned} == {2 * size - 1}


@given(SIZES, st.integers(1, 4), st.integers(1, 3))
def test_pieces_come_back_in_the_order_of_the_sequence(size, chunk, batch):
    whole = torch.arange(batch * 2 * size * chunk * 3).view(batch, -1, 3)
    pieces = torch.stack([own_chunks(whole, index=index, size=size) for index in range(size)])
    assert torch.equal(natural_order(pieces), whole)
    assert torch.equal(zigzag_order(whole, size=size), pieces)


def test_what_a_rank_holds_ascends():
    positions = torch.arange(24)[None]
    assert own_chunks(positions, index=1, size=3).tolist() == [[4, 5, 6, 7, 16, 17, 18, 19]]


def test_unequal_chunks_are_refused():
    with pytest.raises(AssertionError, match="10 positions do not make 4 equal chunks"):
        own_chunks(torch.zeros(1, 10), index=0, size=2)


def whole_batch() -> Batch:
    tokens = torch.arange(16).view(2, 8)
    return Batch(tokens, tokens + 1, (tokens % 3 > 0).float(), None, (tokens % 8 > 4).int())


def test_a_group_of_one_gets_its_batch_back():
    batch = whole_batch()
    assert split_batch(batch, Group.single_rank("cp")) is batch


@ranks(2, cp=2)
def test_ranks_share_a_batch_without_loss(ctx):
    # Given a batch without position ids
    whole, group = whole_batch(), ctx.group("cp")
    # when it is split
    mine = split_batch(whole, group)
    # then every rank holds its tokens with the labels, mask and positions that belong to them
    own = [[0, 1, 6, 7], [2, 3, 4, 5]][group.index]
    assert mine.position_ids is not None and mine.position_ids.tolist() == [own]
    assert torch.equal(mine.tokens, whole.tokens[:, own])
    assert torch.equal(mine.labels, mine.tokens + 1)
    assert torch.equal(mine.loss_mask, whole.loss_mask[:, own])
    assert torch.equal(mine.segment_ids, whole.segment_ids)


@ranks(2, cp=2)
def test_given_positions_are_kept(ctx):
    whole = whole_batch()
    restarted = Batch(whole.tokens, whole.labels, whole.loss_mask, torch.arange(16).view(2, 8) % 5, None)
    mine = split_batch(restarted, ctx.group("cp"))
    assert torch.equal(mine.position_ids, mine.tokens % 5)
    assert mine.segment_ids is None
