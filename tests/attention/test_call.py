"""A call is the same under every kernel that runs on a CPU, shows its tiles to an observer, and falls back to tiles."""

import pytest
import torch

from nanotrain.attention import tiles
from nanotrain.attention.call import AttentionCall, TileKernel
from nanotrain.attention.max_logits import largest_logits
from nanotrain.attention.scores import ScoreOptions
from nanotrain.attention.sdpa import DenseKernel, SdpaKernel
from nanotrain.attention.tiles import Spans
from tests.parallel.cp.sequences import Shape, random_inputs, segments

SHAPE = Shape(heads=4, groups=2)
LATE = range(12, 24)  # queries of the second half


def call_of(kernel, segment_ids=None) -> AttentionCall:
    return AttentionCall(kernel, Spans.of(segment_ids, length=24), LATE, range(24), device=torch.device("cpu"))


@pytest.mark.parametrize("segment_ids", [None, segments(SHAPE)], ids=["causal", "documents"])
def test_kernels_agree_on_a_chunk_of_queries(segment_ids, monkeypatch):
    monkeypatch.setattr(tiles, "QUERIES_PER_MASK", 4)
    inputs = random_inputs(SHAPE, dtype=torch.float64)
    sink = ScoreOptions(torch.linspace(-1, 2, SHAPE.heads).double())
    for scores in (None, sink):
        results = [
            call_of(kernel, segment_ids)(inputs.query[:, 12:], key=inputs.key, value=inputs.value, scores=scores)
            for kernel in (DenseKernel(), TileKernel(), SdpaKernel())
        ]
        assert call_of(TileKernel(), segment_ids).is_causal == (segment_ids is None)
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-12)


def test_an_observer_sees_each_tile_once():
    inputs, seen = random_inputs(SHAPE, dtype=torch.float64), []
    call = call_of(DenseKernel(), segments(SHAPE))
    call(inputs.query[:, 12:], key=inputs.key, value=inputs.value, observe=lambda chunk: seen.append(chunk))
    assert len(seen) == len(call.tiles.tiles) > 1
    assert all(largest_logits(chunk).isfinite().all() for chunk in seen)
