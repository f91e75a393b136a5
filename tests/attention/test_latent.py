"""Attention that gathers selected keys is attention that masks the others, with its gradients and
the loss of the index, and computes no product with a key that is not selected.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nanotrain.attention import latent, selection
from nanotrain.attention.absorbed import UpProjection
from nanotrain.attention.call import AttentionCall, TileKernel
from nanotrain.attention.chunk_kernels import WeightDropout
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.gathered import GATHERED_NUMEL
from nanotrain.attention.latent import attend_gathered
from nanotrain.attention.selection import Index, IndexerLoss
from nanotrain.attention.sparse import attend_selected
from nanotrain.attention.tiles import Spans
from nanotrain.comm.group import Group
from nanotrain.config.layer_kinds import DSAConfig
from nanotrain.config.model import MLAConfig, ModelConfig
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.shape import ModelShape
from tests.model.mixers import assert_near
from tests.train.saved_tensors import PeakStorages

B, S, N, HEADS, E = 2, 29, 3, 4, 6
C, R, DN, DV = 10, 4, 5, 7
SEGMENTS = torch.tensor([[0] * 11 + [1] * 18, [0] * 20 + [1] * 3 + [2] * 6])
DROPOUT = WeightDropout(torch.tensor([12345, 999]), 0.3, first_head=2)
OPTIONS = {
    "plain": None,
    "softcap": ScoreOptions(softcap=0.8),
    "dropout": ScoreOptions(dropout=DROPOUT),
}


def leaves(length: int = S) -> dict[str, Tensor]:
    """Random queries, compressed keys, weights, and the tensors of an index."""
    draw = torch.Generator().manual_seed(3)
    shapes = {
        "query": (B, length, N, DN + R),
        "key": (B, length, 1, C + R),
        "weight": (N * (DN + DV), C),
        "index_query": (B, length, HEADS, E),
        "index_key": (B, length, E),
        "index_weight": (B, length, HEADS),
    }
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }


def call_of(queries: range, segment_ids: Tensor | None = None) -> AttentionCall:
    spans = Spans.of(segment_ids, length=queries.stop)
    return AttentionCall(TileKernel(), spans, queries, torch.device("cpu"))


def attend(
    x: dict[str, Tensor],
    *,
    topk: int,
    gathers: bool,
    call: AttentionCall,
    loss: IndexerLoss | None = None,
    scores: ScoreOptions | None = None,
) -> Tensor:
    """Attention of some queries in one of the forms."""
    rows, keys = slice(call.queries.start, call.queries.stop), slice(0, len(call.keys))
    up = UpProjection(x["weight"], DN, DV)
    index = Index(
        x["index_query"][:, rows], x["index_key"][:, keys], x["index_weight"][:, rows], topk, loss
    )
    options: dict[str, Any] = {"call": call, "scores": scores}
    query, key = x["query"][:, rows], x["key"][:, keys]
    if gathers:
        return attend_gathered(query, key=key, index=replace(index, up=up), **options)
    compressed, rotary = key.split((C, R), dim=-1)
    per_head = torch.einsum("bsc,ndc->bsnd", compressed[:, :, 0], up.key)
    value = torch.einsum("bsc,ndc->bsnd", compressed[:, :, 0], up.value)
    wide_key = torch.cat((per_head, rotary.expand(-1, -1, N, -1)), dim=-1)
    return attend_selected(query, key=wide_key, value=value, index=index, **options)


def gradients(x: dict[str, Tensor], out: Tensor) -> list[Tensor]:
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(4))
    return [out, *torch.autograd.grad(out, [*x.values()], grad)]


@pytest.mark.parametrize("segment_ids", [None, SEGMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("loss", ["none", "all keys", "selected keys"])
def test_gathered_keys_are_masked_keys(
    segment_ids: Tensor | None, name: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, call = leaves(), call_of(range(S), segment_ids)
    found = []
    for gathers in (False, True):
        sums = torch.zeros(2, dtype=torch.float64)
        indexer_loss = None
        if loss != "none":
            group = Group.single_rank("tp")
            indexer_loss = IndexerLoss(0.5, loss == "selected keys", group, sums)
        out = attend(x, topk=5, gathers=gathers, call=call, loss=indexer_loss, scores=OPTIONS[name])
        found.append([*gradients(x, out), sums])
        # blocks of a few queries, parts of two, and compressed queries of three
        monkeypatch.setattr(selection, "BLOCK_SCORES", B * HEADS * S * 7)
        monkeypatch.setattr(latent, "COMPRESSED_NUMEL", B * N * (C + R) * 3)
        monkeypatch.setitem(GATHERED_NUMEL, "cpu", B * 5 * (C + R) * 2)
    masked, gathered = found
    assert_near(gathered, masked, tolerance=1e-12)
    assert masked[-1].any() == (loss != "none")


def test_calls_of_later_queries_are_the_call_of_all() -> None:
    x = leaves()
    whole = attend(x, topk=5, gathers=True, call=call_of(range(S)))
    parts = [
        attend(x, topk=5, gathers=True, call=call_of(queries))
        for queries in (range(12), range(12, S))
    ]
    assert_near([torch.cat(parts, dim=1)], [whole], tolerance=1e-13)
    assert_near(gradients(x, torch.cat(parts, dim=1)), gradients(x, whole), tolerance=1e-12)


def test_an_observer_sees_the_largest_logit_of_selected_keys() -> None:
    seen: list[Tensor] = []

    def observe(chunk: Any) -> None:
        logits = (chunk.query @ chunk.key.mT).masked_fill(~chunk.mask, -torch.inf)
        seen.append(logits.amax((2, 3)).unflatten(0, (B, -1)).amax((0, 1)) * chunk.scale)

    x = leaves()
    options = ScoreOptions(observe=observe)
    with torch.no_grad():
        attend(x, topk=5, gathers=True, call=call_of(range(S)), scores=options)
        largest = torch.stack(seen).amax(0)
        seen.clear()
        attend(x, topk=5, gathers=False, call=call_of(range(S)), scores=options)
    torch.testing.assert_close(largest, torch.stack(seen).amax(0), rtol=1e-12, atol=0)


def counted_flops(topk: int, length: int) -> int:
    """FLOPs of a forward and backward with the loss over selected keys, without index scores."""
    x = leaves(length)
    loss = IndexerLoss(0.5, True, Group.single_rank("tp"), None)
    with FlopCounterMode(display=False) as counter:
        out = attend(x, topk=topk, gathers=True, call=call_of(range(length)), loss=loss)
        out.backward(torch.ones_like(out))
    num_scores = length**2 if topk < length else 0
    return counter.get_total_flops() - 2 * B * num_scores * HEADS * (E + 1)


def test_flops_grow_with_selected_keys_and_not_with_the_square_of_the_length() -> None:
    few, twice, longer = (counted_flops(*sizes) for sizes in ((8, 64), (16, 64), (8, 128)))
    per_key = 2 * B * 64 * 8 * (N * (5 * (C + R) + 3 * C) + HEADS * (3 * E + 2))
    assert twice - few == per_key
    assert longer == 2 * few, "of twice the queries"


@pytest.mark.parametrize(("heads", "topk", "width"), [(8, 32, 64), (16, 64, 128)])
def test_temporaries_of_a_backward_are_within_a_fifth_of_the_plan(
    heads: int, topk: int, width: int
) -> None:
    """Storages of operators on the meta device: the peak of the backward, less what was kept."""
    length = 2048
    config = ModelConfig(
        num_layers=1,
        vocab_size=8,
        num_attention_heads=heads,
        multi_latent_attention=True,
        mla=MLAConfig(
            q_lora_rank=24,
            kv_lora_rank=width,
            qk_head_dim=32,
            qk_pos_emb_head_dim=16,
            v_head_dim=32,
        ),
        sparse_attention_type="dsa",
        dsa=DSAConfig(n_heads=2, head_dim=16, topk=topk, use_sparse_loss=True),
    )
    sizes = LayerSizes.for_model(ModelShape.of(config), seq_length=length)
    operators = MIXERS["dsa"].operators(replace(sizes, device="cpu", itemsize=2))
    (planned,) = (operator.working for operator in operators if operator.name == "core_attn")
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta", requires_grad=True)
    up = UpProjection(empty(heads * 64, width), 32, 32)
    loss = IndexerLoss(1.0, True, Group.single_rank("tp"), None)
    index_query, index_key = empty(1, length, 2, 16), empty(1, length, 16)
    index = Index(index_query, index_key, empty(1, length, 2), topk, loss, up=up)
    spans = Spans.of(None, length=length)
    call = AttentionCall(TileKernel(), spans, range(length), torch.device("meta"))
    query, key = empty(1, length, heads, 48), empty(1, length, 1, width + 16)
    with PeakStorages() as storages:
        out = attend_gathered(query, key=key, call=call, index=index, scores=None)
        kept = storages.num_bytes
        storages.peak = 0
        out.backward(torch.empty_like(out))
    assert planned == pytest.approx(storages.peak - kept, rel=0.2)
