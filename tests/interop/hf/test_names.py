"""Names of tensors: every declared parameter has one, and the parameters tile the tensors of the
files.
"""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.model import MoEConfig
from nanotrain.interop.hf.families import FAMILIES, family_of
from nanotrain.interop.hf.names import TensorMapping, map_parameters
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
    with pytest.raises(AssertionError, match=r"layers.0.attention_norm.bias|attention.query_norm"):
        map_parameters(replace(QWEN3), FAMILIES["gpt2"])


def test_the_rotary_channels_of_a_head_are_its_first_ones() -> None:
    heads = replace(LLAMA, hidden_size=32, num_attention_heads=4, kv_channels=8, rotary_percent=0.5)
    query = map_parameters(heads, FAMILIES["ernie4_5"])["layers.0.attention.query.weight"]
    assert query.rows is not None and query.rows[8:16] == (8, 10, 9, 11, 12, 13, 14, 15)


MAPPINGS = [
    TensorMapping("bias", (5,), offset=5, num_outputs=15),
    TensorMapping("matrix", (4, 3)),
    TensorMapping("transposed", (4, 3), transposed=True, offset=4, num_outputs=12),
    TensorMapping("reordered", (6, 3), rows=(0, 1, 2, 4, 3, 5)),
    TensorMapping("expert.{expert}.w1", (3, 4, 2)),
    TensorMapping("fused", (3, 4, 2), offset=4, num_outputs=9),
]


@given(mapping=st.sampled_from(MAPPINGS), data=st.data())
def test_a_box_written_slice_by_slice_reads_back(
    mapping: TensorMapping, data: st.DataObject
) -> None:
    # Given a stored parameter,
    parameter = torch.randn(mapping.shape)
    stored = {
        name: torch.full(shape, float("nan")) for name, shape in mapping.tensor_shapes.items()
    }
    for part in mapping.slices(Box.full(mapping.shape)):
        stored[part.tensor][part.stored.slices()] = part.as_stored(parameter[part.box.slices()])
    # when any box of it is read,
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in mapping.shape]
    box = Box(tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds))
    actual = torch.full(box.shape, float("nan"))
    parts = list(mapping.slices(box))
    for part in parts:
        values = stored[part.tensor][part.stored.slices()]
        actual[part.box.within(box).slices()] = part.as_parameter(values)
    # then it is that box, and no other tensor was read.
    assert torch.equal(actual, parameter[box.slices()])
    if mapping.rows is None:
        assert len(parts) == (box.shape[0] if "{expert}" in mapping.tensor else 1)
    assert sum(part.stored.numel for part in parts) == box.numel
