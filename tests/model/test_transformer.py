"""A stage: its loss, its logits, its parameters, unpacked and in a pipeline; attention on a shard
of the heads.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanotrain.attention.sdpa import SDPAttention
from nanotrain.config.model import ModelConfig
from nanotrain.data.batch import Batch
from nanotrain.model.attention import Attention
from nanotrain.model.context import AttentionInputs, BatchContext, LayerContext, ModelParallel
from nanotrain.model.parameters import Parameters
from nanotrain.model.transformer import Stage, build_stage
from nanotrain.spec.stages import StageSpec, split_layers
from tests.model.building import (
    GPT2,
    LLAMA,
    MODELS,
    VOCAB,
    build,
    give_storage,
    random_batch,
    randomize,
)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_masked_sum_of_cross_entropies_over_the_real_vocabulary(name: str) -> None:
    model, batch = randomize(build(MODELS[name])), random_batch()
    logits = model.logits(batch.tokens)
    each = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    assert logits.shape[-1] == VOCAB
    torch.testing.assert_close(
        model(None, BatchContext(batch)), (each * batch.loss_mask.flatten()).sum()
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-untied"])
def test_padded_rows_of_the_vocabulary_change_neither_loss_nor_get_a_gradient(name: str) -> None:
    model, batch = build(MODELS[name]), random_batch()
    before = model(None, BatchContext(batch))
    weight = model.embedding.word.weight if model.head.weight is None else model.head.weight
    weight.data[VOCAB:] = 1e4
    loss = model(None, BatchContext(batch))
    loss.backward()
    assert torch.equal(loss, before)
    assert weight.grad[VOCAB:].abs().max() == 0
    assert weight.grad[:VOCAB].abs().max() > 0


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [LLAMA, GPT2])
def test_a_pipeline_of_stages_computes_the_model(
    family: ModelConfig, tied: bool, num_stages: int
) -> None:
    model = replace(family, num_layers=3, untie_embeddings_and_output_weights=not tied)
    whole, batch = build(model), random_batch()
    stages = [build(model, spec=spec) for spec in split_layers(3, num_stages)]
    hidden = None
    for stage in stages:
        hidden = stage(hidden, BatchContext(batch))
    expected = whole(None, BatchContext(batch))
    hidden.backward()
    expected.backward()
    assert torch.equal(hidden, expected)
    # A tied weight lives on both ends; its gradient is the sum of the two.
    actual: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            actual[name] = actual[name] + parameter.grad if name in actual else parameter.grad
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, msg=name)


@pytest.mark.parametrize("name", ["llama", "llama-untied", "gpt2"])
def test_parameters_may_be_replaced_after_the_build(name: str) -> None:
    model, batch = build(MODELS[name]), random_batch()
    before = model(None, BatchContext(batch))
    values = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    give_storage(model)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(values[key])
    assert torch.equal(model(None, BatchContext(batch)), before)
    model(None, BatchContext(batch)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_token_sees_only_its_past(name: str) -> None:
    model, batch = build(MODELS[name]), random_batch(batch=1)
    changed = batch.tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % VOCAB
    first, second = model.logits(batch.tokens), model.logits(changed)
    torch.testing.assert_close(first[0, :10], second[0, :10])
    assert not torch.allclose(first[0, 10], second[0, 10])


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_documents_in_one_sample_are_the_documents_on_their_own(name: str) -> None:
    model = randomize(build(MODELS[name]))
    lengths = (7, 1, 12, 4)
    whole = random_batch(batch=1, length=sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])[
        None
    ]
    packed = model(
        None, BatchContext(Batch(whole.tokens, whole.labels, whole.loss_mask, positions, documents))
    )
    unpacked, start = torch.zeros(()), 0
    for length in lengths:
        part = slice(start, start + length)
        document = Batch(
            whole.tokens[:, part], whole.labels[:, part], whole.loss_mask[:, part], None, None
        )
        unpacked = unpacked + model(None, BatchContext(document))
        start += length
    torch.testing.assert_close(packed, unpacked)


def test_a_stage_runs_on_the_meta_device() -> None:
    stage = build_stage(LLAMA, dtype="bf16")
    batch = random_batch()
    on_meta = Batch(
        *(x.to("meta") for x in (batch.tokens, batch.labels, batch.loss_mask)), None, None
    )
    loss = stage(None, BatchContext(on_meta))
    loss.backward()
    assert loss.device.type == "meta"
    assert all(parameter.grad.shape == parameter.shape for parameter in stage.parameters())


def test_bf16_follows_fp32() -> None:
    exact, rounded, batch = build(LLAMA), build(LLAMA, dtype=torch.bfloat16), random_batch()
    expected, actual = exact(None, BatchContext(batch)), rounded(None, BatchContext(batch))
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_block_is_traced_in_one_graph_that_computes_the_same(name: str) -> None:
    # The tracer without code generation: what takes long in torch.compile is the compiler behind
    # it.
    model, batch = randomize(build(MODELS[name])), random_batch()
    expected = model(None, BatchContext(batch))
    expected.backward()
    gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    first = model.layers["0"]
    first.forward = torch.compile(first.forward, fullgraph=True, backend="aot_eager")
    actual = model(None, BatchContext(batch))
    actual.backward()
    torch.testing.assert_close(actual, expected)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_registers_the_declared_parameters_on_the_meta_device(name: str) -> None:
    for spec in split_layers(2, 2):
        stage = build_stage(MODELS[name], spec, dtype="bf16")
        registered = [
            (name, tuple(parameter.shape)) for name, parameter in stage.named_parameters()
        ]
        assert registered == [(local.spec.name, local.spec.shape) for local in stage.params]
        assert all(p.is_meta and p.dtype is torch.bfloat16 for p in stage.parameters())


def test_parameters_other_than_declared_are_refused() -> None:
    declared = build_stage(LLAMA).params
    with pytest.raises(AssertionError, match="declared"):
        Stage(
            LLAMA, StageSpec.single(2), params=declared[::-1], parallel=ModelParallel.single_rank()
        )


def test_one_segment_is_causal_attention_without_segments() -> None:
    layer = build(LLAMA).layers["0"].attention
    hidden = torch.randn(2, 9, 32)
    ids = torch.zeros(2, 9, dtype=torch.int32)
    masked = LayerContext(AttentionInputs(mask=SDPAttention().plan_mask(ids, tokens=ids)))
    torch.testing.assert_close(layer(hidden, masked), layer(hidden, LayerContext()))


def test_a_layer_with_half_of_the_heads_computes_those_heads() -> None:
    full = build(LLAMA).layers["0"].attention
    hidden, total = torch.randn(2, 9, 32), torch.zeros(2, 9, 32)
    for rank in range(2):
        # Given the shards of one of two tp ranks,
        shards = {}
        for name in ("query", "key", "value", "output"):
            weight = getattr(full, name).weight.detach()
            shards[f"{name}.weight"] = nn.Parameter(
                weight.chunk(2, dim=1 if name == "output" else 0)[rank]
            )
        half = Attention(LLAMA, Parameters(shards), parallel=ModelParallel.single_rank(), layer=0)
        # when each runs, then their outputs add up.
        total = total + half(hidden, LayerContext())
    torch.testing.assert_close(total, full(hidden, LayerContext()))
