"""Ulysses re-shards heads and sequence without changing a value, and repeats key/value heads only
as needed.
"""

import pytest
import torch

from nanotrain.attention.chunks import ScoreOptions
from nanotrain.parallel.cp.split import join_shards
from nanotrain.parallel.cp.ulysses import UlyssesAttention
from tests.harness import ranks
from tests.parallel.cp.sequences import Shape, random_inputs, shard


@ranks(2, cp=2)
def test_head_shards_are_slices_of_the_full_tensors_and_come_back(ctx):
    group = ctx.group("cp")
    attention = UlyssesAttention(group)
    full = random_inputs(Shape(head_dim=12, groups=2), dtype=torch.float32)
    local = shard(full, group)

    by_head = attention.to_head_shards([local.query, local.key, local.value])

    for tensor, expected in zip(by_head, (full.query, full.key, full.value), strict=True):
        heads = expected.shape[2] // 2
        assert torch.equal(tensor, expected[:, :, group.index * heads : (group.index + 1) * heads])
    assert torch.equal(attention.to_sequence_shards(by_head[0]), local.query)


@ranks(4, cp=4)
def test_key_value_heads_are_repeated_to_the_least_common_multiple(ctx):
    sent = []
    attention = UlyssesAttention(ctx.group("cp"))
    attention._all_to_all = lambda shards: sent.append(shards.shape) or shards
    for groups, repeated in ((1, 4), (2, 4), (4, 4), (6, 12)):
        local = shard(
            random_inputs(Shape(heads=12, groups=groups), dtype=torch.float32), ctx.group("cp")
        )
        attention(local.query, key=local.key, value=local.value, mask=None, scores=None)
        assert sent[-2][-1] == (12 + 2 * repeated) * 8 // 4


@ranks(2, cp=2)
def test_every_rank_has_the_sinks_of_its_heads(ctx):
    local, seen = shard(random_inputs(Shape(heads=4), dtype=torch.float32), ctx.group("cp")), []
    attention = UlyssesAttention(ctx.group("cp"))
    attention.sdpa = lambda query, *, scores, **rest: seen.extend(scores.sink.tolist()) or query
    scores = ScoreOptions(sink=torch.arange(4.0))
    attention(local.query, key=local.key, value=local.value, mask=None, scores=scores)
    assert seen == [[0.0, 1.0], [2.0, 3.0]][ctx.group("cp").index]


@ranks(2, cp=2)
def test_heads_that_cp_does_not_divide_are_never_computed(ctx):
    local = shard(random_inputs(Shape(heads=3, groups=3), dtype=torch.float32), ctx.group("cp"))
    attention = UlyssesAttention(ctx.group("cp"))
    with pytest.raises(AssertionError, match="cp = 2 does not divide 3 query heads"):
        attention(local.query, key=local.key, value=local.value, mask=None, scores=None)
    with pytest.raises(Exception, match="divide"):  # what is left of the check under python -O
        attention.to_head_shards([local.query, local.key, local.value])


def test_shards_join_in_the_order_of_the_sequence():
    shards = torch.tensor([[[0, 3]], [[1, 2]]])
    assert join_shards(shards).tolist() == [[0, 1, 2, 3]]
