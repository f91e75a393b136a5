"""Zigzag shards hold every position once, in ascending order, and join to the full sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.comm.group import Group
from nanotrain.data.batch import Batch
from nanotrain.parallel.cp.split import (
    join_shards,
    local_chunks,
    local_positions,
    split_batch,
    stack_shards,
    zigzag_chunks,
)
from tests.harness import ranks

SIZES = st.integers(1, 9)


@given(SIZES)
def test_every_chunk_is_on_one_rank_and_all_ranks_have_the_same_number_of_keys(size):
    chunks = [zigzag_chunks(index, size) for index in range(size)]
    assert sorted(n for rank in chunks for n in rank) == list(range(2 * size))
    assert len({sum(rank) for rank in chunks}) == 1


@given(SIZES, st.integers(1, 3))
def test_shards_join_to_what_was_sharded(size, chunk):
    full = torch.arange(2 * 2 * size * chunk * 3).reshape(2, 2 * size * chunk, 3)
    shards = stack_shards(full, size=size)
    assert shards.shape == (size, 2, 2 * chunk, 3)
    assert torch.equal(join_shards(shards), full)


@given(SIZES, st.integers(1, 3))
def test_local_positions_index_the_local_chunks(size, chunk):
    full = torch.randn(2, 2 * size * chunk)
    for index in range(size):
        positions = local_positions(full.shape[1], index=index, size=size)
        assert positions.dtype == torch.int64 and positions.tolist() == sorted(positions.tolist())
        assert torch.equal(full[:, positions], local_chunks(full, index=index, size=size))


def test_unequal_chunks_are_refused():
    with pytest.raises(AssertionError, match="10 positions do not make 4 equal chunks"):
        local_chunks(torch.zeros(1, 10), index=0, size=2)


def full_batch() -> Batch:
    tokens = torch.arange(16).view(2, 8)
    return Batch(tokens, tokens + 1, (tokens % 3 > 0).float(), None, (tokens % 8 > 4).int())


def test_a_group_of_one_rank_gets_its_batch_back():
    batch = full_batch()
    assert split_batch(batch, Group.single_rank("cp")) is batch


@ranks(2, cp=2, shares=True)
def test_every_rank_gets_its_tokens_with_their_labels_mask_and_positions(ctx):
    # Given a batch without position ids
    full, group = full_batch(), ctx.group("cp")
    # when it is split
    local = split_batch(full, group)
    # then labels, mask and positions follow the tokens, and segment ids are those of the full
    # sequences.
    positions = [[0, 1, 6, 7], [2, 3, 4, 5]][group.index]
    assert local.position_ids is not None and local.position_ids.tolist() == [positions]
    assert torch.equal(local.tokens, full.tokens[:, positions])
    assert torch.equal(local.labels, local.tokens + 1)
    assert torch.equal(local.loss_mask, full.loss_mask[:, positions])
    assert torch.equal(local.segment_ids, full.segment_ids)
    # Sequences further on are shifted before they are split: the next token may be on another rank.
    (further,) = split_batch(full.with_mtp(1), group).mtp
    shifted = full.with_mtp(1).mtp[0]
    assert torch.equal(further.tokens, shifted.tokens[:, positions])
    assert torch.equal(further.labels, shifted.labels[:, positions])
    assert torch.equal(further.loss_mask, shifted.loss_mask[:, positions])


@ranks(2, cp=2, shares=True)
def test_position_ids_of_the_batch_are_kept(ctx):
    full = full_batch()
    restarted = Batch(
        full.tokens, full.labels, full.loss_mask, torch.arange(16).view(2, 8) % 5, None
    )
    local = split_batch(restarted, ctx.group("cp"))
    assert torch.equal(local.position_ids, local.tokens % 5)
    assert local.segment_ids is None
