"""A module's view of its declared parameters."""

import pytest
import torch

from nanotrain.model.parameters import Parameters
from nanotrain.spec.params import Constant, LocalParam, Normal, ParamSpec, Shard, localize


def declared() -> list[LocalParam]:
    weight = ParamSpec(
        "mlp.up.weight", (8, 4), dtype="bf16", init=Normal(0.02), weight_decay=True, shards=(Shard(0, "tp"),)
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
