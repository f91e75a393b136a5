"""Attention to selected blocks: calls of some queries, and masks; tests/model/test_block_sparse.py
has the whole layer.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention import blocks
from nanotrain.attention.block_sparse import attend_blocks
from nanotrain.attention.blocks import BlockIndex
from nanotrain.attention.call import AttentionCall, TileKernel
from nanotrain.attention.chunk_kernels import WeightDropout
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.selection import IndexerLoss
from nanotrain.attention.tiles import Spans
from nanotrain.comm.group import Group
from tests.model.mixers import assert_near

B, S, N, G, D, DV, E = 2, 29, 4, 2, 6, 5, 3
SEGMENTS = torch.tensor([[0] * 11 + [1] * 18, [0] * 20 + [1] * 3 + [2] * 6])
ALL = range(S)
OPTIONS = {
    "plain": None,
    "softcap, sink": ScoreOptions(softcap=0.8, sink=torch.tensor([0.1, -0.3, 0.2, 0.7]).double()),
    "dropout": ScoreOptions(dropout=WeightDropout(torch.tensor([12345, 999]), 0.3, first_head=2)),
}


def leaves(length: int = S) -> dict[str, Tensor]:
    """Random queries, keys and values, and the tensors of an index."""
    draw = torch.Generator().manual_seed(3)
    shapes = {
        "query": (B, length, N, D),
        "key": (B, length, G, D),
        "value": (B, length, G, DV),
        "index_query": (B, length, G, E),
        "index_key": (B, length, E),
    }
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }


def attend(
    x: dict[str, Tensor],
    queries: range = ALL,
    *,
    segment_ids: Tensor | None = None,
    scores: ScoreOptions | None = None,
    **options: Any,
) -> Tensor:
    """Attention of some queries to blocks of four keys; options of the index."""
    rows, keys = slice(queries.start, queries.stop), slice(0, queries.stop)
    spans = Spans.of(segment_ids, length=x["query"].shape[1])
    call = AttentionCall(TileKernel(), spans, queries, torch.device("cpu"))
    index_query, index_key = x["index_query"][:, rows], x["index_key"][:, keys]
    sizes = {"size": 4, "topk": 2, "num_local": 1} | options
    index = BlockIndex(index_query, index_key, **sizes)
    query, key, value = x["query"][:, rows], x["key"][:, keys], x["value"][:, keys]
    return attend_blocks(query, key=key, value=value, call=call, index=index, scores=scores)


def gradients(x: dict[str, Tensor], out: Tensor) -> list[Tensor]:
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(4))
    return [out, *torch.autograd.grad(out, [*x.values()], grad)]


@pytest.mark.parametrize("segment_ids", [None, SEGMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize("name", OPTIONS)
def test_calls_of_some_queries_are_the_call_of_all(
    segment_ids: Tensor | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, whole, parts = leaves(), *torch.zeros(2, 2, dtype=torch.float64)
    options = {"segment_ids": segment_ids, "scores": OPTIONS[name]}
    tp = Group.single_rank("tp")
    out = attend(x, loss=IndexerLoss(0.5, False, tp, whole), **options)
    expected = gradients(x, out)
    monkeypatch.setattr(blocks, "BLOCK_SCORES", B * N * 32 * 5)  # blocks of five queries
    loss = IndexerLoss(0.5, False, tp, parts)
    outputs = [attend(x, queries, loss=loss, **options) for queries in (range(13), range(13, S))]
    assert_near(gradients(x, torch.cat(outputs, dim=1)), expected, tolerance=1e-12)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)
    assert whole[1] == B * S and all(grad.any() for grad in expected)


def test_a_query_that_may_select_all_blocks_attends_to_all() -> None:
    x = leaves()
    query, key, value = (x[name].transpose(1, 2) for name in ("query", "key", "value"))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    found = attend(x, topk=8)
    assert_near([found], [expected.transpose(1, 2)], tolerance=1e-12)
    assert (attend(x, topk=7) - found).abs().max() > 0.1


def test_an_observer_sees_the_largest_logit_of_selected_keys() -> None:
    x, seen = leaves(), []
    with torch.no_grad():
        attend(x, scores=ScoreOptions(observe=lambda chunk: seen.append(chunk)))
    (chunk,) = seen
    assert chunk.mask.shape == (B, G, S, S)
    assert 0 < chunk.mask.sum(-1).max() <= 8
