"""The tables of names: every parameter has a place, and the places tile the files' tensors."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from nanotrain.config.config import MoEConfig
from nanotrain.hf.families import FAMILIES, family_of
from nanotrain.hf.place import Place
from nanotrain.model.build import build_stage, collect_specs
from nanotrain.topology.boxes import Box
from nanotrain.topology.stages import split_layers
from tests.model.building import LLAMA, QWEN3
from tests.model.building import MODELS as DENSE

EXPERTS = MoEConfig(num_experts=4, ffn_hidden_size=24)
MODELS = DENSE | {
    "mixtral": replace(LLAMA, moe=EXPERTS),
    "qwen3_moe": replace(QWEN3, moe=replace(EXPERTS, layer_freq="[0]+[1]")),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_table_names_exactly_the_parameters_of_the_model(name: str) -> None:
    model = MODELS[name]
    stage = build_stage(model, split_layers(model.num_layers, 1)[0], dtype=torch.float32)
    shapes = {spec.name: spec.shape for spec in collect_specs(stage)}
    places = FAMILIES[family_of(model)].places(model)
    assert places.keys() == shapes.keys()
    for key, place in places.items():
        padded = key in ("embedding.word.weight", "head.weight")
        assert place.shape[padded:] == shapes[key][padded:]
        assert place.shape[0] == (model.vocab_size if padded else shapes[key][0])


@pytest.mark.parametrize("name", MODELS)
def test_places_tile_every_tensor_of_the_files(name: str) -> None:
    model = MODELS[name]
    family = FAMILIES[family_of(model)]
    for layout in (family.places, *family.other_places):
        check_tiling(layout(model).values())


def check_tiling(places: Iterable[Place]) -> None:
    boxes: dict[str, list[Box]] = {}
    wholes: dict[str, Box] = {}
    for place in places:
        for piece in place.pieces(Box.full(place.shape)):
            boxes.setdefault(piece.tensor, []).append(piece.stored)
        for tensor, shape in place.tensor_shapes.items():
            assert wholes.setdefault(tensor, Box.full(shape)) == Box.full(shape)
    assert boxes.keys() == wholes.keys()
    for tensor, pieces in boxes.items():
        assert sum(piece.numel for piece in pieces) == wholes[tensor].numel
        assert all(piece.within(wholes[tensor]) for piece in pieces)
        assert not any(a.intersect(b) for i, a in enumerate(pieces) for b in pieces[:i])
