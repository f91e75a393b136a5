"""The selection of keys: ties, masks of bits, calls of some queries; tests/model/test_dsa.py has
the whole layer.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanotrain.attention import selection, sparse
from nanotrain.attention.call import AttentionCall, TileKernel
from nanotrain.attention.selection import Index
from nanotrain.attention.sparse import attend_selected
from nanotrain.attention.tiles import Spans
from nanotrain.comm.group import Group
from tests.parallel.cp.sequences import Shape, random_inputs, segments

SHAPE = Shape(length=19)
INPUTS = random_inputs(SHAPE, dtype=torch.float64)


def index_of(*, topk: int, sums: Tensor | None = None, num_heads: int = 2) -> Index:
    """A random index with few heads, so that many scores are 0; with a loss where its divergences
    are summed.
    """
    draw = torch.Generator().manual_seed(1)
    shapes = ((2, 19, num_heads, 6), (2, 19, 6), (2, 19, num_heads))
    tensors = [
        torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]
    loss = (
        None if sums is None else selection.IndexerLoss(0.5, False, Group.single_rank("tp"), sums)
    )
    return Index(*tensors, topk, loss)


def attend(index: Index, queries: range, segment_ids: Tensor | None = None) -> Tensor:
    """Attention of some queries to the keys up to the last of them."""
    rows, keys = slice(queries.start, queries.stop), slice(0, queries.stop)
    call = AttentionCall(
        TileKernel(), Spans.of(segment_ids, length=19), queries, torch.device("cpu")
    )
    index = replace(
        index, query=index.query[:, rows], key=index.key[:, keys], weight=index.weight[:, rows]
    )
    inputs = {"key": INPUTS.key[:, keys], "value": INPUTS.value[:, keys]}
    return attend_selected(INPUTS.query[:, rows], **inputs, call=call, index=index, scores=None)


@pytest.mark.parametrize("num_keys", [1, 8, 19])
def test_a_mask_comes_back_from_its_bits(num_keys: int) -> None:
    mask = torch.rand(2, 3, num_keys, generator=torch.Generator().manual_seed(0)) > 0.5
    bits = sparse.pack_bits(mask)
    assert bits.dtype == torch.uint8 and bits.shape[-1] == -(-num_keys // 8)
    tile = sparse.Tile(slice(None), slice(0, 3), slice(0, num_keys), is_masked=True)
    plan = sparse.SelectedTiles((tile,), torch.arange(3), torch.arange(num_keys), bits={0: bits})
    assert torch.equal(plan.mask(tile), mask[:, None])


@pytest.mark.parametrize("segment_ids", [None, segments(SHAPE)], ids=["causal", "documents"])
def test_calls_of_some_queries_are_the_call_of_all(
    segment_ids: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = torch.zeros(2, 2, dtype=torch.float64)
    index = index_of(topk=3, sums=whole)
    out = attend(index, range(19), segment_ids)
    grads = torch.autograd.grad(out.sum(), (index.query, index.key, index.weight))
    monkeypatch.setattr(
        selection, "BLOCK_SCORES", 2 * 4 * 19 * 3
    )  # blocks of three queries and more
    index = index_of(topk=3, sums=parts)
    of_parts = torch.cat(
        [attend(index, queries, segment_ids) for queries in (range(8), range(8, 19))], dim=1
    )
    torch.testing.assert_close(of_parts, out, rtol=1e-13, atol=1e-13)
    expected = torch.autograd.grad(of_parts.sum(), (index.query, index.key, index.weight))
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)
    assert whole[1] == 2 * 19 and all(grad.any() for grad in grads)


def test_a_query_that_may_select_all_keys_attends_to_all() -> None:
    causal = torch.ones(19, 19, dtype=torch.bool).tril()
    query, key, value = (x.transpose(1, 2) for x in (INPUTS.query, INPUTS.key, INPUTS.value))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=causal
    ).transpose(1, 2)
    torch.testing.assert_close(
        attend(index_of(topk=19), range(19)), expected, rtol=1e-12, atol=1e-12
    )
    assert (attend(index_of(topk=3), range(19)) - expected).abs().max() > 0.1
