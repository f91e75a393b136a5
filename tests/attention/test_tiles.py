"""Tiles cover what queries attend to, each pair once; no mask is larger than documents and windows need."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.attention import tiles
from nanotrain.attention.tiles import LocalChunk, Spans, TilePlan, plan_chunks
from tests.parallel.cp.sequences import full_mask


def covered(plan: TilePlan, batch: int) -> torch.Tensor:
    """[B, Q, K]: how many tiles have each pair."""
    count = torch.zeros(batch, len(plan.queries), len(plan.keys), dtype=torch.int64)
    for tile in plan.tiles:
        part = count[tile.samples, tile.queries, tile.keys]
        if tile.is_masked:
            part += plan.mask(tile)[:, 0]
        else:
            ones = torch.ones(part.shape[1:], dtype=torch.int64)
            part += ones.tril() if tile.is_causal else ones
    return count


@given(
    st.lists(st.lists(st.integers(1, 15), max_size=4), min_size=1, max_size=2),
    st.none() | st.integers(0, 9),
    st.integers(1, 7),
    st.integers(1, 4),
)
def test_every_pair_is_in_one_tile(borders, window, queries_per_mask, chunks):
    positions = np.arange(16)
    ids = torch.from_numpy(np.stack([np.searchsorted(np.unique(row), positions, side="right") for row in borders]))
    full = full_mask(ids, length=16, window=window)[:, 0].long()
    spans, size = Spans.of(ids, length=16, window=window), 16 // chunks
    all_positions = torch.arange(16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "QUERIES_PER_MASK", queries_per_mask)
        for c in range(chunks):
            queries, keys = range(c * size, (c + 1) * size), range((c + 1) * size)
            at = {"queries": all_positions[c * size : (c + 1) * size]}
            whole = plan_chunks(spans, [(LocalChunk(queries), LocalChunk(keys), True)], keys=all_positions, **at)
            # keys of a chunk at a time, as in a ring
            pairs = [
                (LocalChunk(queries), LocalChunk(range(k * size, (k + 1) * size), k * size), k == c)
                for k in (c, *range(c))
            ]
            for plan in (whole, plan_chunks(spans, pairs, keys=all_positions, **at)):
                assert torch.equal(covered(plan, len(ids)), full[:, queries.start : queries.stop])
                first = torch.zeros(len(ids), size, dtype=torch.int64)
                for tile in plan.tiles:
                    first[tile.samples, tile.queries] += tile.is_first
                assert (first == 1).all()


def test_documents_have_no_masks_and_windows_small_ones():
    ids = torch.arange(1024)[None] // 256
    queries = keys = torch.arange(1024)
    pair = [(LocalChunk(range(1024)), LocalChunk(range(1024)), True)]
    documents = plan_chunks(Spans.of(ids, length=1024), pair, queries=queries, keys=keys)
    assert [(tile.queries.start, tile.is_causal, tile.is_masked) for tile in documents.tiles] == [
        (start, True, False) for start in range(0, 1024, 256)
    ]
    assert not documents.has_repeated_queries and not documents.has_repeated_keys and documents.first_keys is None
    window = plan_chunks(Spans.of(None, length=1024, window=200), pair, queries=queries, keys=keys)
    masks = [window.mask(tile).numel() for tile in window.tiles if tile.is_masked]
    assert sum(masks) <= 1024 * (200 + 2 * tiles.QUERIES_PER_MASK) and window.has_repeated_keys
    # many short documents share tiles
    short = plan_chunks(Spans.of(torch.arange(1024)[None] // 10, length=1024), pair, queries=queries, keys=keys)
    assert len(short.tiles) == 8 and all(window.mask(tile).numel() < 140**2 for tile in short.tiles)


def test_a_plan_says_which_queries_and_keys_are_in_several_tiles():
    positions, everything = torch.arange(8), LocalChunk(range(8))
    last = [(LocalChunk(range(4, 8)), everything, True)]
    behind = plan_chunks(Spans.of(None, length=8), last, queries=positions[4:], keys=positions)
    assert behind.has_repeated_queries and not behind.has_repeated_keys  # keys before the queries, and their own
    # the same of each sample: a window of two documents, and two documents without a window
    ids = torch.tensor([[0] * 8, [0] * 5 + [1] * 3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "QUERIES_PER_MASK", 2)
        plans = [
            plan_chunks(
                Spans.of(ids, length=8, window=window),
                [(everything, everything, True)],
                queries=positions,
                keys=positions,
            )
            for window in (2, None)
        ]
    assert [plan.has_repeated_keys for plan in plans] == [True, False]
    assert not plans[1].has_repeated_queries
