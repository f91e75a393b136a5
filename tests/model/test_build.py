"""What is known of a model before it has storage."""

import pytest
import torch

from nanotrain.config.count import num_parameters
from nanotrain.config.derive import padded_vocab_size
from nanotrain.model.build import build_stage, collect_specs
from nanotrain.topology.params import ParamKind
from nanotrain.topology.stages import split_layers
from tests.model.building import MODELS


def specs_of(name: str, stages: int = 1) -> list:
    model = MODELS[name]
    built = (build_stage(model, spec, dtype=torch.float32) for spec in split_layers(model.num_layers, stages))
    return [spec for stage in built for spec in collect_specs(stage)]


def test_the_whole_model_is_built_without_storage_and_named_globally() -> None:
    stage = build_stage(MODELS["qwen3-untied"], split_layers(2, 1)[0], dtype=torch.bfloat16)
    layer = [
        "attention_norm.weight",
        "attention.query.weight",
        "attention.key.weight",
        "attention.value.weight",
        "attention.query_norm.weight",
        "attention.key_norm.weight",
        "attention.output.weight",
        "mlp_norm.weight",
        "mlp.gate.weight",
        "mlp.up.weight",
        "mlp.down.weight",
    ]
    expected = ["embedding.word.weight"]
    expected += [f"layers.{i}.{name}" for i in range(2) for name in layer]
    expected += ["final_norm.weight", "head.weight"]
    assert [spec.name for spec in collect_specs(stage)] == expected
    assert all(p.is_meta and p.dtype is torch.bfloat16 for p in stage.parameters())
    assert {spec.dtype for spec in collect_specs(stage)} == {"bf16"}


@pytest.mark.parametrize("name", MODELS)
def test_specs_count_the_parameters_of_the_model(name: str) -> None:
    model = MODELS[name]
    copies = 2 if model.untie_embeddings_and_output_weights else 1
    padding = (padded_vocab_size(model) - model.vocab_size) * model.hidden_size * copies
    assert sum(spec.numel for spec in specs_of(name)) == num_parameters(model) + padding


@pytest.mark.parametrize("name", MODELS)
def test_two_stages_hold_the_whole_model_and_the_tied_weight_twice(name: str) -> None:
    whole = [spec.name for spec in specs_of(name)]
    split = [spec.name for spec in specs_of(name, stages=2)]
    is_tied = not MODELS[name].untie_embeddings_and_output_weights
    assert sorted(split) == sorted(whole + ["embedding.word.weight"] * is_tied)


@pytest.mark.parametrize("name", MODELS)
def test_the_pieces_of_two_tp_ranks_tile_every_parameter(name: str) -> None:
    for spec in specs_of(name):
        boxes = {spec.box({"tp": rank}, {"tp": 2}) for rank in range(2)}
        assert sum(box.numel for box in boxes) == spec.numel
        assert len(boxes) == (2 if spec.shards else 1)


def test_kinds_say_what_decays_and_what_starts_smaller() -> None:
    kinds = {spec.name: spec.kind for spec in specs_of("gpt2-untied")}
    assert kinds["embedding.position.weight"] is ParamKind.embedding
    assert kinds["layers.1.mlp.down.weight"] is kinds["layers.0.attention.output.weight"] is ParamKind.output_matrix
    assert kinds["layers.1.mlp.up.bias"] is kinds["final_norm.bias"] is ParamKind.bias
    decayed = {spec.name for spec in specs_of("gpt2-untied") if spec.decays}
    assert all(name.endswith("weight") and "norm" not in name for name in decayed)


def test_only_a_tied_word_embedding_is_marked_tied() -> None:
    assert [spec.name for spec in specs_of("llama", stages=2) if spec.is_tied] == ["embedding.word.weight"] * 2
    assert not [spec for spec in specs_of("llama-untied", stages=2) if spec.is_tied]
