"""Names of tensors: every declared parameter has one, and the parameters tile the tensors of the
files.
"""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from nanotrain.config.model import MoEConfig
from nanotrain.interop.hf.families import FAMILIES, family_of
from nanotrain.interop.hf.names import UnnamedParameter, map_parameters
from nanotrain.interop.hf.tensor_mapping import TensorMapping
from nanotrain.spec.boxes import Box
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape
from tests.model.building import LLAMA, QWEN3
from tests.model.building import MODELS as DENSE

MODELS = DENSE | {
    "mixtral": replace(LLAMA, moe=MoEConfig(num_experts=4, ffn_hidden_size=24)),
    "qwen2_moe": replace(
        LLAMA,
        add_qkv_bias=True,
        moe=MoEConfig(
            num_experts=4,
            ffn_hidden_size=24,
            shared_expert_intermediate_size=20,
            shared_expert_gate=True,
        ),
    ),
    "qwen3_moe": replace(
        QWEN3, moe=MoEConfig(num_experts=4, ffn_hidden_size=24, layer_freq="[0]+[1]")
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_name_and_its_shape_without_padding(name: str) -> None:
    model = MODELS[name]
    shapes = {spec.name: spec.shape for spec in declare_model(ModelShape.of(model))}
    mappings = map_parameters(model, FAMILIES[family_of(model)])
    assert mappings.keys() == shapes.keys()
    for key, mapping in mappings.items():
        padded = key in ("embedding.word.weight", "head.weight")
        assert mapping.shape[padded:] == shapes[key][padded:]
        assert mapping.shape[0] == (model.vocab_size if padded else shapes[key][0])


@pytest.mark.parametrize("name", MODELS)
def test_parameters_tile_every_tensor_of_the_files(name: str) -> None:
    model = MODELS[name]
    family = FAMILIES[family_of(model)]
    for naming in family.namings:
        check_tiling(map_parameters(model, naming).values())


def check_tiling(mappings: Iterable[TensorMapping]) -> None:
    boxes: dict[str, list[Box]] = {}
    tensors: dict[str, Box] = {}
    for mapping in mappings:
        for part in mapping.slices(Box.full(mapping.shape)):
            boxes.setdefault(part.tensor, []).append(part.stored)
        for tensor, shape in mapping.tensor_shapes.items():
            assert tensors.setdefault(tensor, Box.full(shape)) == Box.full(shape)
    assert boxes.keys() == tensors.keys()
    for tensor, parts in boxes.items():
        assert sum(part.numel for part in parts) == tensors[tensor].numel
        assert all(part.within(tensors[tensor]) for part in parts)
        assert not any(a.intersect(b) for i, a in enumerate(parts) for b in parts[:i])


def test_a_model_that_a_family_has_no_names_for_is_refused() -> None:
    with pytest.raises(
        UnnamedParameter, match=r"layers.0.attention_norm.bias|attention.query_norm"
    ):
        map_parameters(replace(QWEN3), FAMILIES["gpt2"])


def test_the_rotary_channels_of_a_head_are_its_first_ones() -> None:
    heads = replace(LLAMA, hidden_size=32, num_attention_heads=4, kv_channels=8, rotary_percent=0.5)
    query = map_parameters(heads, FAMILIES["ernie4_5"])["layers.0.attention.query.weight"]
    assert query.rows is not None and query.rows[8:16] == (8, 10, 9, 11, 12, 13, 14, 15)
