"""DeepSeek Sparse Attention is that of transformers, and its loss that of Megatron-LM,
differentiated by autograd.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.attention import selection
from nanotrain.attention.sdpa import SDPAttention
from nanotrain.config.layer_kinds import DSAConfig
from nanotrain.config.model import MLAConfig, ModelConfig
from nanotrain.model.context import AttentionInputs, LayerContext
from nanotrain.model.mla import MultiLatentAttention
from nanotrain.model.rope import RotaryTables, apply_rotary
from tests.attention.fp64_transformers import modeling_in_fp64
from tests.model.building import LLAMA
from tests.model.mixers import assert_near, backward, random_hidden, random_mixer

B, S, H, N, TOPK = 2, 24, 32, 4, 5
MODEL = replace(
    LLAMA,
    num_query_groups=None,
    multi_latent_attention=True,
    mla=MLAConfig(
        q_lora_rank=24, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6
    ),
    sparse_attention_type="dsa",
    # so many index heads that no score is exactly 0, among which the order is a matter of taste
    dsa=DSAConfig(n_heads=16, head_dim=8, topk=TOPK, loss_coeff=0.5),
)
THEIRS = {
    "query_down": "q_a_proj",
    "query_latent_norm": "q_a_layernorm",
    "query_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_latent_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "output": "o_proj",
    "indexer.query": "indexer.wq_b",
    "indexer.key": "indexer.wk",
    "indexer.key_norm": "indexer.k_norm",
    "indexer.head_weight": "indexer.weights_proj",
}
SEGMENTS = torch.tensor([[0] * 7 + [1] * 17, [0] * 12 + [1] * 3 + [2] * 9])


def context_of(
    model: ModelConfig, hidden: Tensor, segment_ids: Tensor | None = None
) -> LayerContext:
    """The context of a microbatch of two sequences, of which the loss is the mean over all tokens."""
    rotary = RotaryTables(model).at(S, like=hidden)
    mask = SDPAttention().plan_mask(segment_ids, tokens=hidden[..., 0])
    return LayerContext(
        AttentionInputs(rotary, mask), segment_ids=segment_ids, aux_loss_scale=1 / B
    )


def gradients(model: ModelConfig, segment_ids: Tensor | None = None) -> tuple[Any, list[Tensor]]:
    """A layer with random weights, its output and gradients."""
    layer, hidden = random_mixer(model), random_hidden(B, S, H)
    return layer, backward(layer(hidden, context_of(model, hidden, segment_ids)), hidden, layer)


# --- transformers


def neighbours(weight: Tensor, *, heads: int, is_first: bool) -> Tensor:
    """Rows of rotary channels of each head, the first or the last ones, from pairs (i, i + R/2) to
    neighbours.
    """
    rotary, parts = MODEL.mla.qk_pos_emb_head_dim, weight.unflatten(0, (heads, -1))
    order = torch.arange(rotary).view(2, -1).T.flatten()
    if is_first:
        return torch.cat((parts[:, order], parts[:, rotary:]), dim=1).flatten(0, 1)
    return torch.cat((parts[:, :-rotary], parts[:, -rotary:][:, order]), dim=1).flatten(0, 1)


def as_theirs(name: str, value: Tensor, *, family: str) -> Tensor:
    """A parameter of ours in the order of the files; in DeepSeek-V3.2 the channels of the indexer
    are halves.
    """
    if name in ("query_up.weight", "kv_down.weight"):
        return neighbours(value, heads=N if name == "query_up.weight" else 1, is_first=False)
    if family == "glm_moe_dsa" and name.startswith(("indexer.query", "indexer.key")):
        return neighbours(value, heads=16 if "query" in name else 1, is_first=True)
    return value


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_outputs_and_gradients_are_those_of_transformers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # first: it changes the precision of our rotary angles too
    modeling = modeling_in_fp64(family, monkeypatch)
    model, (layer, ours) = MODEL, gradients(MODEL)
    params = {
        name: value.detach().clone().requires_grad_() for name, value in layer.named_parameters()
    }
    prefix = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}[family]
    config = getattr(modeling, f"{prefix}Config")(
        hidden_size=H, num_attention_heads=N, num_key_value_heads=N, q_lora_rank=24, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, index_n_heads=16, index_head_dim=8, index_topk=TOPK,
        num_hidden_layers=1, attn_implementation="eager",
    )  # fmt: skip
    theirs = getattr(modeling, f"{prefix}Attention")(config, layer_idx=0)
    named = {}
    for name, value in params.items():
        module, leaf = name.rsplit(".", 1)
        named[f"{THEIRS[module]}.{leaf}"] = as_theirs(name, value, family=family)
    assert {name for name, _ in theirs.named_parameters()} == set(named)
    hidden = random_hidden(B, S, H)
    table = RotaryTables(MODEL).at(S, like=hidden)
    rotary = tuple(torch.cat((x, x), dim=-1)[None, :, 0] for x in (table.cos, table.sin))
    mask = torch.full((S, S), -torch.inf, dtype=torch.float64).triu(1).expand(B, 1, S, S)
    out = torch.func.functional_call(theirs, named, (hidden, rotary, mask))[0]
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(7))
    expected = torch.autograd.grad(out, [hidden, *params.values()], grad, allow_unused=True)
    assert [name for name, found in zip(params, expected[1:], strict=True) if found is None] == [
        name for name in params if name.startswith("indexer")
    ], "their indexer is not trained"
    pairs = [(a, b) for a, b in zip(ours[1:], expected, strict=True) if b is not None]
    assert_near([ours[0], *(a for a, _ in pairs)], [out, *(b for _, b in pairs)])
    without = replace(model, dsa=replace(model.dsa, topk=S))
    assert (gradients(without)[1][0] - out).abs().max() > 0.01, "the selection matters"


# --- a reference in dense tensors


def reference(layer: Any, model: ModelConfig, segment_ids: Tensor | None) -> list[Tensor]:
    """The output and gradients of the layer, with the scores of all pairs and a loss that autograd
    differentiates.
    """
    hidden, dsa = random_hidden(B, S, H), model.dsa
    rotary, positions = RotaryTables(model).at(S, like=hidden), torch.arange(S)
    query, compressed = layer._compress(hidden)
    compressed_kv, shared = compressed.split(layer.compressed_sizes, dim=-1)
    latent = layer.query_latent_norm(query)
    query, key, value = MultiLatentAttention.up_project(
        layer, latent, layer.kv_latent_norm(compressed_kv), shared_key=shared, rotary=rotary
    )
    may_attend = (positions <= positions[:, None]).expand(B, S, S)
    if segment_ids is not None:
        may_attend = may_attend & (segment_ids[:, :, None] == segment_ids[:, None])

    indexer = layer.indexer
    index_query = indexer.query(latent.detach()).unflatten(-1, (dsa.n_heads, -1))
    index_key = indexer.key_norm(indexer.key(hidden.detach()))[:, :, None]
    index_query, index_key = apply_rotary(index_query, rotary), apply_rotary(index_key, rotary)
    dots = (
        torch.einsum("bqie,bkie->bqki", index_query, index_key.expand_as(index_query))
        * dsa.head_dim**-0.5
    )
    weights = indexer.head_weight(hidden.detach()) * dsa.n_heads**-0.5
    index_scores = (dots.relu() * weights[:, :, None]).sum(-1).masked_fill(~may_attend, -torch.inf)
    chosen = torch.zeros(B, S, S, dtype=torch.bool)
    for b in range(B):
        for q in range(S):  # a stable sort prefers the earlier of equal keys
            order = index_scores[b, q].sort(descending=True, stable=True).indices[: dsa.topk]
            chosen[b, q, order] = True
    chosen &= may_attend

    scores = torch.einsum("bqnd,bknd->bnqk", query, key) * query.shape[-1] ** -0.5
    out = scores.masked_fill(~chosen[:, None], -torch.inf).softmax(-1) @ value.transpose(1, 2)
    seen = chosen if dsa.use_sparse_loss else may_attend
    target = scores.detach().masked_fill(~seen[:, None], -torch.inf).softmax(-1).mean(1)
    log_probs = index_scores.masked_fill(~seen, -torch.inf).log_softmax(-1).masked_fill(~seen, 0.0)
    divergence = (torch.xlogy(target, target) - target * log_probs).sum(-1)
    loss = dsa.loss_coeff * divergence.mean()
    assert layer.divergence.sums.tolist() == pytest.approx(
        [divergence.sum().item(), B * S], rel=1e-10
    )
    out = layer.output(out.transpose(1, 2).flatten(2))
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(7))
    total = (out * grad).sum() + loss
    return [out, *torch.autograd.grad(total, [hidden, *layer.parameters()])]


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_indexer_learns_the_attention_of_all_heads(
    has_documents: bool, is_sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # scores of 0 are equal
    model = replace(MODEL, dsa=replace(MODEL.dsa, use_sparse_loss=is_sparse, n_heads=2))
    segment_ids = SEGMENTS if has_documents else None
    layer, found = gradients(model, segment_ids)
    assert_near(found, reference(layer, model, segment_ids))
    monkeypatch.setattr(selection, "BLOCK_SCORES", B * N * S * 5)  # blocks of five queries
    assert_near(gradients(model, segment_ids)[1], found)


def test_a_loss_that_nobody_reads_is_not_computed() -> None:
    frozen = replace(MODEL, dsa=replace(MODEL.dsa, loss_coeff=0.0))
    layer, found = gradients(frozen)
    names = [name for name, _ in layer.named_parameters()]
    of_indexer = [
        grad for name, grad in zip(names, found[2:], strict=True) if name.startswith("indexer")
    ]
    assert not any(grad.any() for grad in of_indexer) and not layer.divergence.sums.any()
    with torch.no_grad():
        layer, hidden = random_mixer(MODEL), random_hidden(B, S, H)
        out = layer(hidden, context_of(MODEL, hidden))
    assert torch.equal(out, found[0].detach()) and not layer.divergence.sums.any()


def test_padding_trains_nothing() -> None:
    layer, hidden = random_mixer(MODEL), random_hidden(B, S, H)
    context = replace(context_of(MODEL, hidden), is_padding=True)
    found = backward(layer(hidden, context), hidden, layer)
    assert (
        not layer.divergence.sums.any()
        and not any(grad.any() for grad in found[-5:])
        and found[2].any()
    )
