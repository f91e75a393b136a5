"""Attention to selected blocks of keys is that of transformers, and the loss of its indexer one
that autograd differentiates.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention import blocks
from nanotrain.config.layer_kinds import DSAConfig
from nanotrain.config.model import ModelConfig
from nanotrain.model.rope import RotaryTables, apply_rotary
from tests.attention.fp64_transformers import modeling_in_fp64
from tests.model.building import LLAMA
from tests.model.mixers import assert_near, random_hidden
from tests.model.test_dsa import SEGMENTS, B, H, S, context_of, gradients

N, G, D, E, SIZE, TOPK, ROTARY = 4, 2, 8, 6, 4, 2, 4
MODEL = replace(
    LLAMA,
    num_layers=1,
    num_attention_heads=N,
    num_query_groups=G,
    rotary_percent=0.5,
    qk_layernorm=True,
    apply_layernorm_1p=True,
    sparse_attention_type="blocks",
    dsa=DSAConfig(n_heads=G, head_dim=E, topk=SIZE * TOPK, block_size=SIZE, loss_coeff=0.5),
)
THEIRS = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
    "output": "o_proj",
    "indexer.query": "indexer.q_proj",
    "indexer.key": "indexer.k_proj",
    "indexer.query_norm": "indexer.q_norm",
    "indexer.key_norm": "indexer.k_norm",
}


@pytest.mark.parametrize("num_local", [1, 2])
def test_outputs_and_gradients_are_those_of_transformers(
    num_local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # first: it changes the precision of our rotary angles too
    modeling = modeling_in_fp64("minimax_m3_vl", monkeypatch)
    model = replace(MODEL, dsa=replace(MODEL.dsa, num_local_blocks=num_local))
    layer, ours = gradients(model)
    params = {
        name: value.detach().clone().requires_grad_() for name, value in layer.named_parameters()
    }
    config = modeling.MiniMaxM3VLTextConfig(
        hidden_size=H, num_attention_heads=N, num_key_value_heads=G, head_dim=D, num_hidden_layers=1,
        index_n_heads=G, index_head_dim=E, index_block_size=SIZE, index_topk_blocks=TOPK,
        index_local_blocks=num_local, layer_types=["minimax_m3_sparse"], attn_implementation="eager",
    )  # fmt: skip
    theirs = modeling.MiniMaxM3VLAttention(config, layer_idx=0)
    named = {}
    for name, value in params.items():
        module, leaf = name.rsplit(".", 1)
        named[f"{THEIRS[module]}.{leaf}"] = value
    assert {name for name, _ in theirs.named_parameters()} == set(named)
    hidden = random_hidden(B, S, H)
    table = RotaryTables(model).at(S, like=hidden)
    rotary = tuple(torch.cat((x, x), dim=-1)[None, :, 0] for x in (table.cos, table.sin))
    mask = torch.full((S, S), -torch.inf, dtype=torch.float64).triu(1).expand(B, 1, S, S)
    arguments = (hidden, rotary, mask)
    options = {"position_ids": torch.arange(S)[None]}
    out = torch.func.functional_call(theirs, named, arguments, options)[0]
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(7))
    expected = torch.autograd.grad(out, [hidden, *params.values()], grad, allow_unused=True)
    untrained = [name for name, found in zip(params, expected[1:], strict=True) if found is None]
    assert untrained == [name for name in params if name.startswith("indexer")]
    pairs = [(a, b) for a, b in zip(ours[1:], expected, strict=True) if b is not None]
    assert_near([ours[0], *(a for a, _ in pairs)], [out, *(b for _, b in pairs)])
    without = replace(model, dsa=replace(model.dsa, topk=S))
    assert (gradients(without)[1][0] - out).abs().max() > 0.01, "the selection matters"


# --- a reference in dense tensors


def block_of(segment_ids: Tensor) -> list[list[int]]:
    """The block of each key; documents begin blocks."""
    numbers = []
    for row in segment_ids.tolist():
        block, used, found = -1, SIZE, []
        for position, document in enumerate(row):
            if used == SIZE or document != row[position - 1]:
                block, used = block + 1, 0
            used += 1
            found.append(block)
        numbers.append(found)
    return numbers


def reference(layer: Any, model: ModelConfig, segment_ids: Tensor | None) -> list[Tensor]:
    """The output and gradients of the layer, query by query, with a loss that autograd
    differentiates.
    """
    hidden, dsa, indexer = random_hidden(B, S, H), model.dsa, layer.indexer
    rotary = RotaryTables(model).at(S, like=hidden)
    query, key, value, _ = layer._project(hidden)
    query, key = layer.prepare_query_key(query, key, rotary=rotary, query_scale=None)
    fixed = hidden.detach()
    index_query = indexer.query_norm(indexer.query(fixed).unflatten(-1, (G, E)))
    index_key = indexer.key_norm(indexer.key(fixed))[:, :, None]
    index_query, index_key = (apply_rotary(x, rotary) for x in (index_query, index_key))
    documents = torch.zeros(B, S, dtype=torch.long) if segment_ids is None else segment_ids
    numbers, outputs, divergence = block_of(documents), [], torch.zeros((), dtype=torch.float64)
    for b in range(B):
        for q in range(S):
            keys = [k for k in range(q + 1) if documents[b, k] == documents[b, q]]
            blocks_of_query = sorted({numbers[b][k] for k in keys})
            for g in range(G):
                members = {m: [k for k in keys if numbers[b][k] == m] for m in blocks_of_query}
                products = index_key[b, :, 0] @ index_query[b, q, g]
                score = {m: products[members[m]].max() for m in blocks_of_query}
                local = blocks_of_query[-dsa.num_local_blocks :]
                others = sorted(
                    (m for m in blocks_of_query if m not in local), key=lambda m: -score[m].item()
                )
                chosen = sorted([*local, *others][: dsa.topk_blocks])
                selected = [k for m in chosen for k in members[m]]
                heads = query[b, q].unflatten(0, (G, -1))[g]
                probs = (heads @ key[b, selected, g].T * D**-0.5).softmax(-1)
                outputs.append(probs @ value[b, selected, g])
                seen = chosen if dsa.use_sparse_loss else blocks_of_query
                counted = [k for m in seen for k in members[m]]
                weights = (heads @ key[b, counted, g].T * D**-0.5).softmax(-1).mean(0).detach()
                target = torch.stack(
                    [weights[[counted.index(k) for k in members[m]]].sum() for m in seen]
                )
                log_probs = (torch.stack([score[m] for m in seen]) * E**-0.5).log_softmax(-1)
                divergence = divergence + F.kl_div(log_probs, target, reduction="sum")
    divergence = divergence / G
    assert layer.divergence.sums.tolist() == pytest.approx([divergence.item(), B * S], rel=1e-10)
    attended = torch.stack(outputs).view(B, S, G * (N // G) * D)
    out = layer.output(attended)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(7))
    total = (out * grad).sum() + dsa.loss_coeff * divergence / (B * S)
    return [out, *torch.autograd.grad(total, [hidden, *layer.parameters()])]


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_indexer_learns_the_attention_of_the_heads_of_its_group(
    has_documents: bool, is_sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(MODEL, dsa=replace(MODEL.dsa, use_sparse_loss=is_sparse))
    segment_ids = SEGMENTS if has_documents else None
    layer, found = gradients(model, segment_ids)
    assert_near(found, reference(layer, model, segment_ids))
    monkeypatch.setattr(blocks, "BLOCK_SCORES", B * N * S * 5)  # a few queries at a time
    assert_near(gradients(model, segment_ids)[1], found)


def test_a_document_attends_in_a_sequence_as_it_does_alone() -> None:
    layer, _ = gradients(MODEL, SEGMENTS)
    hidden = random_hidden(B, S, H)
    with torch.no_grad():
        packed = layer(hidden, context_of(MODEL, hidden, SEGMENTS))
        start = 7  # of the second document of the first sequence
        document = hidden[:1, start:]
        rotary = RotaryTables(MODEL).at(torch.arange(start, S)[None], like=hidden)
        context = context_of(MODEL, document)
        context = replace(context, full=replace(context.full, rotary=rotary))
        found = layer(document, context)
    assert_near([found], [packed[:1, start:]], tolerance=1e-12)
