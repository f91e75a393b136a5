"""A module's view of its declared parameters."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.model.parameters import BLOCK_ELEMENTS, Parameters, fill_random
from nanotrain.spec.boxes import Box
from nanotrain.spec.params import Constant, LocalParam, Normal, ParamSpec, Shard, localize
from nanotrain.spec.stages import StageSpec
from tests.model.building import LLAMA, MODELS, build


def declared() -> list[LocalParam]:
    weight = ParamSpec(
        "mlp.up.weight",
        (8, 4),
        dtype="bf16",
        init=Normal(0.02),
        weight_decay=True,
        shards=(Shard(0, "tp"),),
    )
    bias = ParamSpec("mlp.up.bias", (8,), dtype="bf16", init=Constant(0.0), weight_decay=False)
    return [localize(spec, coords={"tp": 1}, sizes={"tp": 2}) for spec in (weight, bias)]


def test_parameters_have_the_shape_of_the_local_box_and_no_storage() -> None:
    weight, bias = Parameters.on_meta(declared()).linear("mlp.up")
    assert (weight.shape, weight.dtype, weight.is_meta) == ((4, 4), torch.bfloat16, True)
    assert bias is not None and bias.shape == (8,)


def test_names_are_relative_to_a_submodule() -> None:
    params = Parameters.on_meta(declared()).submodule("mlp")
    assert params["up.weight"] is params.submodule("up")["weight"]
    assert len(params) == 2 and not params.submodule("down")


def test_what_is_not_declared_is_none_or_an_error() -> None:
    params = Parameters.on_meta(declared()[:1])
    assert params.get("mlp.up.bias") is None and params.linear("mlp.up")[1] is None
    with pytest.raises(KeyError):
        params["mlp.down.weight"]


HUGE = ParamSpec(
    "layers.0.mlp.up.weight", (5000, 700), dtype="fp32", init=Normal(0.02), weight_decay=True
)


@pytest.mark.parametrize("name", ["llama", "gpt2-untied"])
def test_a_stage_has_the_initial_bits_of_the_full_model(name: str) -> None:
    model = replace(MODELS[name], num_layers=4)
    full = dict(build(model, seed=7).named_parameters())
    last = build(model, spec=StageSpec(1, 2, 4, has_embedding=False, has_head=True), seed=7)
    names = [key for key, _ in last.named_parameters()]
    assert "layers.2.mlp.down.weight" in names
    for key, parameter in last.named_parameters():
        assert torch.equal(parameter, full[key]), key


def test_another_seed_layer_or_name_gives_other_values() -> None:
    first, second = (
        dict(build(LLAMA, seed=1).named_parameters()),
        dict(build(LLAMA, seed=2).named_parameters()),
    )
    gate = "layers.0.mlp.gate.weight"
    assert not torch.equal(first[gate], second[gate])
    assert not torch.equal(first[gate], first["layers.1.mlp.gate.weight"])
    assert not torch.equal(first[gate], first["layers.0.mlp.up.weight"])


def test_matrices_are_normal_and_output_projections_narrower() -> None:
    model = replace(LLAMA, num_layers=8, hidden_size=256, ffn_hidden_size=512, init_method_std=0.05)
    parameters = dict(build(model).named_parameters())
    assert parameters["layers.3.mlp.up.weight"].std().item() == pytest.approx(0.05, rel=0.02)
    assert parameters["layers.3.mlp.down.weight"].std().item() == pytest.approx(0.05 / 4, rel=0.02)
    assert parameters["layers.3.attention.output.weight"].std().item() == pytest.approx(
        0.05 / 4, rel=0.02
    )
    assert torch.equal(parameters["final_norm.weight"], torch.ones(256))
    assert parameters["embedding.word.weight"][131:].std().item() == pytest.approx(0.05, rel=0.05)


def test_bf16_weights_are_the_rounded_fp32_values() -> None:
    exact, rounded = build(LLAMA), build(LLAMA, dtype=torch.bfloat16)
    for value, reference in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(value.bfloat16(), reference)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_box_of_a_parameter_is_a_box_of_the_full_parameter(data: st.DataObject) -> None:
    assert HUGE.numel > 3 * BLOCK_ELEMENTS  # so that boxes cross the borders of blocks
    rows = sorted(data.draw(st.lists(st.integers(0, 5000), min_size=2, max_size=2, unique=True)))
    columns = sorted(data.draw(st.lists(st.integers(0, 700), min_size=2, max_size=2, unique=True)))
    box = Box((rows[0], columns[0]), (rows[1], columns[1]))
    target = torch.full(box.shape, float("nan"))
    fill_random(target, HUGE, box=box, seed=3, init=Normal(0.02))
    assert torch.equal(target, full_of_huge()[box.slices()])


def test_every_row_of_a_parameter_of_several_blocks_has_numbers_of_its_own() -> None:
    assert len(full_of_huge()[:, :2].unique(dim=0)) == len(full_of_huge())


@cache
def full_of_huge() -> torch.Tensor:
    full = torch.empty(HUGE.shape)
    fill_random(full, HUGE, box=Box.full(HUGE.shape), seed=3, init=Normal(0.02))
    return full
