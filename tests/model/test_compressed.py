"""Attention to compressed keys in a model; tests/interop/hf compares it with transformers."""

from dataclasses import replace

import torch

from nanotrain.config.layer_kinds import CompressedAttentionConfig, DSAConfig
from nanotrain.data.batch import Batch
from nanotrain.model.context import BatchContext
from tests.model.building import LLAMA, VOCAB, build, randomize

MODEL = replace(
    LLAMA,
    num_layers=3,
    num_query_groups=1,
    kv_channels=12,
    rotary_percent=0.5,
    window_size=3,
    sparse_attention_type="compressed",
    compressed=CompressedAttentionConfig("CHW", 2, 3, 16, 2, 8),
    dsa=DSAConfig(n_heads=8, head_dim=8, topk=2),
)


def hidden_of(stage, tokens: torch.Tensor, **fields) -> torch.Tensor:
    batch = replace(Batch.from_tokens(tokens), **fields)
    return stage.transform(None, BatchContext(batch))


def test_a_document_computes_the_same_beside_others() -> None:
    """Its windows begin where it begins, and it reads no key of another document."""
    stage = randomize(build(MODEL)).double()
    draw = torch.Generator().manual_seed(1)
    lengths = (7, 1, 12)
    documents = [torch.randint(0, VOCAB, (1, length), generator=draw) for length in lengths]
    ids = torch.cat([torch.full((1, length), at) for at, length in enumerate(lengths)], dim=1)
    positions = torch.cat([torch.arange(length)[None] for length in lengths], dim=1)
    packed = hidden_of(stage, torch.cat(documents, dim=1), segment_ids=ids, position_ids=positions)
    single = torch.cat([hidden_of(stage, tokens) for tokens in documents], dim=1)
    torch.testing.assert_close(packed, single, rtol=0, atol=1e-12)
    mixed = hidden_of(stage, torch.cat(documents, dim=1))
    assert (mixed - single).abs().max() > 1e-3


def test_the_indexer_learns_from_its_own_loss_alone() -> None:
    stage = randomize(build(MODEL)).double()
    tokens = torch.arange(17)[None] * 5 % VOCAB
    context = BatchContext(Batch.from_tokens(tokens), aux_loss_scale=0.0)
    stage(None, context).backward()
    grads = {name: parameter.grad for name, parameter in stage.named_parameters()}
    assert all((grad == 0).all() for name, grad in grads.items() if ".indexer." in name)
    stage.zero_grad()
    stage(None, replace(context, aux_loss_scale=1.0)).backward()
    for name, parameter in stage.named_parameters():
        if ".indexer." in name:
            assert parameter.grad.abs().max() > 0, name
        else:
            torch.testing.assert_close(parameter.grad, grads[name], rtol=0, atol=1e-14, msg=name)
