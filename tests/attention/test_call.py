"""A call is the same under every kernel that runs on a CPU, shows its tiles to an observer, and
falls back to tiles.
"""

import pytest
import torch

from nanotrain.attention import tiles
from nanotrain.attention.call import AttentionCall, TileKernel, largest_logits
from nanotrain.attention.chunk_kernels import AttentionChunk
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.sdpa import DenseKernel, SdpaKernel, SDPAttention
from nanotrain.attention.tiles import Spans
from nanotrain.parallel.cp import CORE_ATTENTIONS, build_core_attention
from nanotrain.parallel.cp.split import local_chunks
from tests.harness import ranks
from tests.parallel.cp.sequences import Shape, full_mask, random_inputs, segments

SHAPE = Shape(heads=4, groups=2)
LATE = range(12, 24)  # queries of the second half


def call_of(kernel, segment_ids=None) -> AttentionCall:
    return AttentionCall(kernel, Spans.of(segment_ids, length=24), LATE, torch.device("cpu"))


@pytest.mark.parametrize("segment_ids", [None, segments(SHAPE)], ids=["causal", "documents"])
def test_kernels_agree_on_a_chunk_of_queries(segment_ids, monkeypatch):
    monkeypatch.setattr(tiles, "QUERIES_PER_MASK", 4)
    inputs = random_inputs(SHAPE, dtype=torch.float64)
    sink = ScoreOptions(torch.linspace(-1, 2, SHAPE.heads).double())
    for scores in (None, sink):
        results = [
            call_of(kernel, segment_ids)(
                inputs.query[:, 12:], key=inputs.key, value=inputs.value, scores=scores
            )
            for kernel in (DenseKernel(), TileKernel(), SdpaKernel())
        ]
        assert call_of(TileKernel(), segment_ids).is_causal == (segment_ids is None)
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-12)


def test_an_observer_sees_each_tile_once():
    inputs, seen = random_inputs(SHAPE, dtype=torch.float64), []
    call = call_of(DenseKernel(), segments(SHAPE))
    call(
        inputs.query[:, 12:],
        key=inputs.key,
        value=inputs.value,
        scores=ScoreOptions(observe=lambda chunk: seen.append(chunk)),
    )
    assert len(seen) == len(call.tiles.tiles) > 1
    assert all(largest_logits(chunk).isfinite().all() for chunk in seen)


BATCH, HEADS, GROUPS, LENGTH, HEAD_DIM = 2, 8, 4, 16, 6


def draw(seed: int = 0) -> list[torch.Tensor]:
    """Query, key and value [B, S, heads, D]; the largest of all scores is that of a query and a
    later key.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        torch.randn(BATCH, LENGTH, n, HEAD_DIM, generator=generator)
        for n in (HEADS, GROUPS, GROUPS)
    ]
    drawn[0][0, 0], drawn[1][0, -1] = 9.0, 9.0
    return drawn


def expected(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    key = key.repeat_interleave(HEADS // GROUPS, dim=2)
    scores = torch.einsum("bqnd,bknd->bnqk", query, key) * HEAD_DIM**-0.5
    return scores.masked_fill(~mask, -torch.inf).amax((0, 2, 3))


@pytest.mark.parametrize("block_numel", [1, 1000, 10**6])
@pytest.mark.parametrize("window", [None, 3])
def test_masked_scores_do_not_count(window: int | None, block_numel: int) -> None:
    query, key, value = draw()
    mask = full_mask(None, length=LENGTH, window=window)
    turned = [x.transpose(1, 2) for x in (query, key, value)]
    chunk = AttentionChunk(*turned, mask if window else None, window is None, scale=HEAD_DIM**-0.5)
    actual = largest_logits(chunk, block_numel=block_numel)
    torch.testing.assert_close(actual, expected(query, key, mask))
    assert actual.max() < expected(query, key, torch.ones_like(mask)).max() / 2, (
        "the later key would have shown"
    )


def test_a_head_that_attends_to_nothing_has_no_logit() -> None:
    query, key, value = (x.transpose(1, 2) for x in draw())
    chunk = AttentionChunk(
        query, key, value, torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool), False, scale=1.0
    )
    assert largest_logits(chunk).tolist() == [-torch.inf] * HEADS


def observed(core, tensors, mask) -> torch.Tensor:
    largest = torch.full((HEADS,), -torch.inf)

    def observe(chunk: AttentionChunk, *, first_head: int = 0) -> None:
        actual = largest_logits(chunk)
        heads = largest[first_head : first_head + len(actual)]
        torch.maximum(heads, actual, out=heads)

    query, key, value = tensors
    core(query, key=key, value=value, mask=mask, scores=ScoreOptions(observe=observe))
    return largest


@ranks(4, cp=4)
def test_the_largest_over_cp_is_that_of_full_sequences(ctx) -> None:
    """Every query meets every key on some rank, and each rank names the heads that it has."""
    group, tensors = ctx.group("cp"), draw()
    segments = torch.arange(LENGTH)[None].expand(BATCH, -1) // 6
    local = [local_chunks(x, index=group.index, size=group.size) for x in tensors]
    for ids in (None, segments):
        sdpa = SDPAttention()
        single = observed(sdpa, tensors, sdpa.plan_mask(ids, tokens=tensors[0][..., 0, 0]))
        for comm_type in CORE_ATTENTIONS:
            core = build_core_attention(comm_type, group)
            largest = observed(core, local, core.plan_mask(ids, tokens=local[0][..., 0, 0]))
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
            torch.testing.assert_close(largest, single, msg=comm_type)
