"""FlexAttention: the block table against the mask, and the written-out forward of torch on a CPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.attention import flex
from nanotrain.attention.call import AttentionCall, TileKernel
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.flex import FlexKernel, build_block_mask, plan_blocks
from nanotrain.attention.tiles import Spans
from tests.parallel.cp.sequences import Shape, full_mask, random_inputs, segments

SHAPE = Shape(heads=4, groups=2, length=48, head_dim=16, value_head_dim=16)


def call_of(ids, window, *, start=0, kernel=None) -> AttentionCall:
    spans = Spans.of(ids, length=SHAPE.length, window=window)
    return AttentionCall(
        kernel or FlexKernel(), spans, range(start, start + 24), torch.device("cpu")
    )


@given(
    st.lists(st.integers(1, 47), max_size=5),
    st.none() | st.integers(0, 20),
    st.sampled_from([0, 24]),
)
def test_blocks_are_full_where_all_pairs_attend_and_left_out_only_where_none_does(
    borders, window, start
):
    ids = torch.from_numpy(np.searchsorted(np.unique(borders), np.arange(48), side="right"))[None]
    mask = full_mask(ids, length=48, window=window)[:, 0, start : start + 24, : start + 24]
    partial, full = plan_blocks(call_of(ids, window, start=start), 5)
    for i in range(full.shape[1]):
        for j in range(full.shape[2]):
            block = mask[0, 5 * i : 5 * i + 5, 5 * j : 5 * j + 5]
            assert full[0, i, j] == bool(block.all())
            assert not block.any() or full[0, i, j] or partial[0, i, j]


def formula(query, key, value, *, block_mask, enable_gqa, **options):
    """What `flex_attention` is documented to compute, from the functions it is given."""
    assert enable_gqa
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if "score_mod" in options:
        scores = options["score_mod"](scores, None, None, None, None)
    sample, queries = (
        torch.arange(len(query))[:, None, None, None],
        torch.arange(query.shape[2])[:, None],
    )
    scores = scores.masked_fill(
        ~block_mask.mask_mod(sample, None, queries, torch.arange(key.shape[2])), -torch.inf
    )
    out = scores.softmax(-1) @ value
    return (out, SimpleNamespace(lse=scores.logsumexp(-1))) if "return_aux" in options else out


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("start", [0, 24])
def test_output_and_gradients_are_those_of_tiles(window, start, monkeypatch):
    """With the kernel replaced by its formula: torch has no backward on a CPU."""
    monkeypatch.setattr(flex, "_attend", lambda device_type: formula)
    inputs, sink = (
        random_inputs(SHAPE, dtype=torch.float64),
        torch.linspace(-1, 2, SHAPE.heads).double(),
    )
    queries, keys = slice(start, start + 24), slice(0, start + 24)
    for ids, scores in ((None, None), (segments(SHAPE), ScoreOptions(sink, 1.5))):
        results = []
        for kernel in (FlexKernel(), TileKernel()):
            parts = (inputs.query[:, queries], inputs.key[:, keys], inputs.value[:, keys])
            leaves = [
                *(x.clone().requires_grad_() for x in parts),
                *([sink.requires_grad_()] if scores else []),
            ]
            call = call_of(ids, window, start=start, kernel=kernel)
            out = call(leaves[0], key=leaves[1], value=leaves[2], scores=scores)
            results.append([out, *torch.autograd.grad(out, leaves, inputs.out[:, queries])])
        for ours, tiles in zip(*results, strict=True):
            torch.testing.assert_close(ours, tiles, rtol=1e-9, atol=1e-9)


def test_a_block_with_padded_keys_is_never_full_and_torch_gets_whole_blocks():
    spans = Spans.of(None, length=200)
    call = AttentionCall(FlexKernel(), spans, range(199, 200), torch.device("cpu"))
    # the query attends to all keys, of which the second block has 72
    partial, full = plan_blocks(call)
    assert full.tolist() == [[[True, False]]] and partial.tolist() == [[[False, True]]]
    mask = build_block_mask(call)
    assert mask.shape == (1, 1, 128, 256)
    seen = mask.mask_mod(0, None, torch.arange(128)[:, None], torch.arange(256))
    # a query without a key would have no finite log-sum-exp
    assert seen[0].sum() == 200 and seen.any(dim=1).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_forward_of_torch_on_a_cpu_is_that_of_tiles(monkeypatch):
    monkeypatch.setattr(flex, "build_block_mask", lambda call: build_block_mask(call, 16))
    inputs, scores = (
        random_inputs(SHAPE, dtype=torch.float32),
        ScoreOptions(torch.linspace(-1, 2, SHAPE.heads), 1.5),
    )
    calls = [
        call_of(segments(SHAPE), 9, start=24, kernel=kernel)
        for kernel in (FlexKernel(), TileKernel())
    ]
    ours, tiles = (
        call(inputs.query[:, 24:], key=inputs.key, value=inputs.value, scores=scores)
        for call in calls
    )
    torch.testing.assert_close(ours, tiles, rtol=1e-4, atol=1e-5)
