"""Tiles cover what queries attend to, each pair once; no mask is larger than documents and windows
need.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from nanotrain.attention import tiles
from nanotrain.attention.chunks import ScoreOptions, add_sink
from nanotrain.attention.sdpa import DenseKernel, LayerKernels, SDPAttention
from nanotrain.attention.tiles import (
    LocalChunk,
    Spans,
    TilePlan,
    attend_tiles,
    backward_tiles,
    chunk_segments,
    forward_tiles,
    plan_chunks,
)
from tests.parallel.cp.sequences import Shape, full_mask, random_inputs, run, run_dense, segments


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


@given(st.lists(st.integers(1, 15), max_size=4), st.integers(1, 18))
def test_chunks_begin_with_segments_and_need_no_window(borders, size):
    ids = torch.from_numpy(np.searchsorted(np.unique(borders), np.arange(16), side="right"))[None]
    spans = Spans.of(chunk_segments(ids, length=16, size=size), length=16, window=size)
    starts = [int((ids[0] == segment).nonzero()[0]) for segment in ids[0]]
    expected = [start + (position - start) // size * size for position, start in enumerate(starts)]
    assert spans.first_keys.tolist() == [expected] and spans.window is None


@given(
    st.lists(st.lists(st.integers(1, 15), max_size=4), min_size=1, max_size=2),
    st.none() | st.integers(0, 9),
    st.integers(1, 7),
    st.integers(1, 4),
)
def test_every_pair_is_in_one_tile(borders, window, queries_per_mask, chunks):
    positions = np.arange(16)
    ids = torch.from_numpy(
        np.stack([np.searchsorted(np.unique(row), positions, side="right") for row in borders])
    )
    full = full_mask(ids, length=16, window=window)[:, 0].long()
    spans, size = Spans.of(ids, length=16, window=window), 16 // chunks
    all_positions = torch.arange(16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "QUERIES_PER_MASK", queries_per_mask)
        for c in range(chunks):
            queries, keys = range(c * size, (c + 1) * size), range((c + 1) * size)
            at = {"queries": all_positions[c * size : (c + 1) * size]}
            whole = plan_chunks(
                spans, [(LocalChunk(queries), LocalChunk(keys), True)], keys=all_positions, **at
            )
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
    assert not documents.has_repeated_queries and documents.first_keys is None
    window = plan_chunks(Spans.of(None, length=1024, window=200), pair, queries=queries, keys=keys)
    masks = [window.mask(tile).numel() for tile in window.tiles if tile.is_masked]
    assert sum(masks) <= 1024 * (200 + 2 * tiles.QUERIES_PER_MASK)
    # many short documents share tiles
    short = plan_chunks(
        Spans.of(torch.arange(1024)[None] // 10, length=1024), pair, queries=queries, keys=keys
    )
    assert len(short.tiles) == 8 and all(window.mask(tile).numel() < 140**2 for tile in short.tiles)


def test_a_plan_says_whether_a_query_is_in_several_tiles():
    positions, everything = torch.arange(8), LocalChunk(range(8))
    last = [(LocalChunk(range(4, 8)), everything, True)]
    behind = plan_chunks(Spans.of(None, length=8), last, queries=positions[4:], keys=positions)
    assert behind.has_repeated_queries  # keys before the queries, and their own
    documents = Spans.of(torch.tensor([[0] * 8, [0] * 5 + [1] * 3]), length=8)
    pairs = [(everything, everything, True)]
    assert not plan_chunks(documents, pairs, queries=positions, keys=positions).has_repeated_queries


BOUNDS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("queries_per_mask", [1, 5, 128])
def test_output_and_gradients_are_those_of_the_formula(queries_per_mask, window, monkeypatch):
    monkeypatch.setattr(tiles, "QUERIES_PER_MASK", queries_per_mask)
    for shape in (Shape(heads=4, groups=2, batch=3), Shape(head_dim=12, value_head_dim=8)):
        expected = run_dense(
            random_inputs(shape, dtype=torch.float64),
            full_mask(segments(shape), length=shape.length, window=window),
        )
        for dtype, bound in BOUNDS.items():
            actual = run(
                SDPAttention(), random_inputs(shape, dtype=dtype), segments(shape), window=window
            )
            for ours, theirs in zip(actual, expected, strict=True):
                assert (ours.double() - theirs).abs().max() <= bound * theirs.abs().max(), dtype


def kept(core, *, window=None) -> int:
    """Bytes that autograd keeps of attention to 1,024 tokens in four documents."""
    shape = Shape(batch=1, length=1024, heads=1, groups=1)
    inputs = random_inputs(shape, dtype=torch.float32)
    ids, storages = torch.arange(1024)[None] // 256, {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    query, key, value = (
        x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)
    )
    mask = core.plan_mask(ids, tokens=query[..., 0, 0], window=window)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = core(query, key=key, value=value, mask=mask, scores=None)
    assert out.shape == value.shape
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def test_no_tensor_of_queries_by_keys_is_kept():
    tensor = 1024 * 8 * 4
    linear = 4 * tensor + 1024 * 4  # query, key, value, output; log-sum-exp
    assert kept(SDPAttention()) == kept(SDPAttention(), window=100) == linear
    assert kept(SDPAttention(LayerKernels(DenseKernel()))) >= linear + 1024 * 1024, (
        "a dense mask is kept"
    )


@pytest.mark.parametrize("groups", [4, 2])
def test_what_several_tiles_contribute_to_is_accumulated_in_fp32(groups):
    given = random_inputs(Shape(groups=groups), dtype=torch.bfloat16)
    query, key, value, grad = (
        x.transpose(1, 2) for x in (given.query, given.key, given.value, given.out)
    )
    positions, spans = torch.arange(24), Spans.of(None, length=24)
    # the second half of the queries: keys before them, and their own
    pairs = [(LocalChunk(range(12, 24)), LocalChunk(range(24)), True)]
    plan, inputs = (
        plan_chunks(spans, pairs, queries=positions[12:], keys=positions),
        (query[:, :, 12:], key, value),
    )
    merged = forward_tiles(plan, inputs, scores=None)
    assert merged.out.dtype is merged.lse.dtype is torch.float32
    merged = replace(merged, out=merged.out.bfloat16())
    gradients = backward_tiles(plan, inputs, merged=merged, scores=None, grad=grad[:, :, 12:])
    assert gradients.query.dtype is gradients.key.dtype is torch.float32


def test_a_sink_is_added_before_the_output_is_rounded():
    given, sink = random_inputs(Shape(), dtype=torch.bfloat16), torch.tensor([0.3, -1.0, 2.0, 0.7])
    positions, chunk = torch.arange(24), LocalChunk(range(24))
    plan = plan_chunks(
        Spans.of(None, length=24), [(chunk, chunk, True)], queries=positions, keys=positions
    )
    total = forward_tiles(
        plan, tuple(x.transpose(1, 2) for x in (given.query, given.key, given.value)), scores=None
    )
    lse = torch.logaddexp(total.lse, sink[:, None])
    expected = (total.out.float() * (total.lse - lse).exp()[..., None]).bfloat16()
    out = attend_tiles(
        given.query, key=given.key, value=given.value, plan=plan, scores=ScoreOptions(sink)
    )
    assert torch.equal(out.transpose(1, 2), expected)
    assert not torch.equal(add_sink(total, sink).out, expected), "rounding before would differ"
