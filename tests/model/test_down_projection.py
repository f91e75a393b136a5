"""The down projection casts SwiGLU to fp8 where that is possible, with the same bits."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from nanotrain.kernels.deferred_wgrad import WgradQueue
from nanotrain.kernels.fp8.layer import Fp8Options
from nanotrain.model.activations import Glu
from nanotrain.model.context import LayerContext
from nanotrain.model.down_projection import (
    fused_projection,
    project_swiglu,
)
from nanotrain.model.mlp import activate_then_project
from nanotrain.parallel.tp.layers import RowParallelLinear, TensorParallel
from nanotrain.precision.fp8 import FP8_FORMATS, RECIPES
from tests.model.building import LLAMA, build

FP8 = Fp8Options(RECIPES["blockwise"], FP8_FORMATS["e4m3"], is_fused=True)
ACTIVATION = Glu.of(LLAMA)
PLAIN = replace(TensorParallel.single_rank(), fp8=FP8)


def chosen(model_config=LLAMA, *, tensor_parallel: TensorParallel = PLAIN, names=("gate.weight",)):
    return fused_projection(model_config, names, tensor_parallel=tensor_parallel)


def test_a_plain_swiglu_in_fp8_on_one_rank_is_cast_as_it_is_computed() -> None:
    assert chosen() is project_swiglu
    assert chosen(tensor_parallel=replace(PLAIN, fp8=None)) is None
    deferring = replace(PLAIN, wgrad_queue=WgradQueue())
    assert chosen(tensor_parallel=deferring) is None
    assert chosen(names=()) is None, "an MLP without a gate"
    for other in ({"activation_func_clamp_value": 7.0}, {"glu_linear_offset": 1.0}):
        assert chosen(replace(LLAMA, **other)) is None
    assert chosen(replace(LLAMA, activation="geglu_tanh")) is None


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "mxfp8"])
def test_both_projections_have_the_same_bits(recipe: str, has_bias: bool) -> None:
    """By torch's operators, as on CPUs."""
    options = replace(FP8, recipe=RECIPES[recipe], is_fused=False)
    generator = torch.Generator().manual_seed(0)
    results = []
    for project in (activate_then_project, project_swiglu):
        generator.manual_seed(0)
        weight = nn.Parameter(torch.randn(32, 48, generator=generator))
        bias = nn.Parameter(torch.randn(32, generator=generator)) if has_bias else None
        down = RowParallelLinear(weight, bias, tensor_parallel=replace(PLAIN, fp8=options))
        gate, up = (torch.randn(2, 5, 48, generator=generator).requires_grad_() for _ in range(2))
        out = project(down, ACTIVATION, gate, up)
        out.square().sum().backward()
        results.append([out, gate.grad, up.grad, *(param.grad for param in down.parameters())])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_an_mlp_takes_the_projection_that_was_chosen() -> None:
    mlp = build(LLAMA).layers["0"].mlp
    assert mlp.project is activate_then_project, "without fp8"
    params = {name: getattr(mlp, name).weight for name in ("gate", "up", "down")}
    calls = []
    mlp.project = lambda down, activation, gate, up: calls.append((down, gate, up)) or gate
    x = torch.zeros(1, 3, 32)
    mlp(x, LayerContext())
    ((down, gate, up),) = calls
    assert down.weight is params["down"] and gate.shape == up.shape == (1, 3, 48)


def test_a_replaced_activation_is_called() -> None:
    calls = []

    def replaced(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return ACTIVATION(gate, up)

    weight = nn.Parameter(torch.randn(32, 48))
    options = replace(FP8, is_fused=False)
    down = RowParallelLinear(weight, None, tensor_parallel=replace(PLAIN, fp8=options))
    gate = torch.randn(2, 5, 48)
    up = torch.randn(2, 5, 48)
    expected = activate_then_project(down, ACTIVATION, gate, up)
    assert torch.equal(project_swiglu(down, replaced, gate, up), expected)
    assert calls == [1]
