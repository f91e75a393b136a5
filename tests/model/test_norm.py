"""The norms against their formulas."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn

from nanotrain.comm.group import Group
from nanotrain.config.model import ModelConfig
from nanotrain.config.model_fields import Normalization
from nanotrain.model.norm import RMSNorm, build_head_norm, build_norm
from nanotrain.model.parameters import Parameters


def norm_of(
    kind: Normalization, size: int, *, eps: float, dtype: torch.dtype, is_offset: bool = False
) -> nn.Module:
    names = ("weight", "bias") if kind == "LayerNorm" else ("weight",)
    params = Parameters({name: nn.Parameter(torch.empty(size, dtype=dtype)) for name in names})
    config = ModelConfig(normalization=kind, norm_epsilon=eps, apply_layernorm_1p=is_offset)
    return build_norm(config, params)


@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize("kind", get_args(Normalization))
def test_a_norm_scales_to_unit_size(kind: Normalization, is_offset: bool) -> None:
    norm = norm_of(kind, 16, eps=1e-3, dtype=torch.float64, is_offset=is_offset)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(16))
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    centred = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    expected = (
        centred
        / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        * (1 if kind == "L2Norm" else norm.weight + is_offset)
    )
    if kind == "LayerNorm":
        expected = expected + norm.bias
    torch.testing.assert_close(norm(x), expected)
    torch.autograd.gradcheck(norm, x)


@pytest.mark.parametrize("kind", get_args(Normalization))
def test_bf16_is_computed_in_fp32_and_rounded_once(kind: Normalization) -> None:
    exact = norm_of(kind, 64, eps=1e-5, dtype=torch.float32)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(torch.randn(64).bfloat16())
    x = torch.randn(7, 64).bfloat16() * 100
    expected = exact(x.float())
    rounded = exact.bfloat16()(x)
    torch.testing.assert_close(rounded, expected.bfloat16(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("kind", get_args(Normalization))
def test_norms_of_heads_are_of_the_kind_of_the_others(kind: Normalization) -> None:
    """As in Megatron-LM, whose --qk-layernorm takes --normalization for the heads too."""
    like, tp = norm_of(kind, 8, eps=1e-3, dtype=torch.float64), Group.single_rank("tp")
    params = Parameters(
        {f"query_norm.{name}": parameter for name, parameter in like.named_parameters()}
    )
    model_config = ModelConfig(normalization=kind, norm_epsilon=1e-3, qk_layernorm=True)
    for_heads = build_head_norm(
        model_config, params.submodule("query_norm"), channels=slice(0, 24), group=tp
    )
    with torch.no_grad():
        for parameter in like.parameters():
            parameter.copy_(torch.randn(8))
    heads = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    assert torch.equal(for_heads(heads), like(heads))
    model_config = replace(model_config, qk_layernorm=kind != "L2Norm")
    absent = build_head_norm(
        model_config, params.submodule("key_norm"), channels=slice(0, 24), group=tp
    )
    assert isinstance(absent, nn.Identity)
    l2_norm = build_head_norm(
        replace(model_config, qk_layernorm=False),
        Parameters({}),
        channels=slice(0, 24),
        group=tp,
        is_l2=True,
    )
    assert torch.equal(l2_norm(heads), norm_of("L2Norm", 8, eps=1e-3, dtype=torch.float64)(heads))


@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_rms_norm_and_its_gradients_equal_fp64(
    dtype: torch.dtype, tolerance: float, is_offset: bool
) -> None:
    torch.manual_seed(1)
    x, weight = (
        torch.randn(3, 5, 16).to(dtype).requires_grad_(),
        nn.Parameter(torch.randn(16).to(dtype)),
    )
    exact_x, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    grad = torch.randn(3, 5, 16).to(dtype)
    scale = (exact_x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    expected = exact_x * scale * (exact_weight + 1 if is_offset else exact_weight)
    expected.backward(grad.double())
    out = RMSNorm(weight, eps=1e-3, is_offset=is_offset)(x)
    out.backward(grad)
    assert out.dtype is dtype
    for computed, exact in (
        (out, expected.detach()),
        (x.grad, exact_x.grad),
        (weight.grad, exact_weight.grad),
    ):
        torch.testing.assert_close(computed.double(), exact, rtol=tolerance, atol=tolerance)
