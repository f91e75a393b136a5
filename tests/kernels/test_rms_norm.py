"""The torch forms of RMSNorm against fp64, and of a residual sum against the two operations in turn."""

import pytest
import torch
from torch import Tensor

from nanotrain.kernels.rms_norm import add_rms_norm, rms_norm

EPS = 1e-3


def exact_norm(x: Tensor, weight: Tensor, *, is_offset: bool) -> Tensor:
    scale = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x * scale * (weight + 1 if is_offset else weight)


@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_the_norm_and_its_gradients_equal_fp64(dtype: torch.dtype, tolerance: float, is_offset: bool) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(3, 5, 16).to(dtype).requires_grad_(), torch.randn(16).to(dtype).requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = torch.randn(3, 5, 16).to(dtype)
    expected = exact_norm(*exact, is_offset=is_offset)
    expected.backward(grad.double())
    out = rms_norm(*inputs, eps=EPS, is_offset=is_offset)
    out.backward(grad)
    assert out.dtype is dtype
    for found, wanted in ((out, expected), *((x.grad, y.grad) for x, y in zip(inputs, exact, strict=True))):
        torch.testing.assert_close(found.double(), wanted.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_sum_is_that_of_the_sum_to_the_bit(dtype: torch.dtype, is_offset: bool) -> None:
    torch.manual_seed(2)
    x, residual = (torch.randn(3, 5, 16).to(dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(16).to(dtype).requires_grad_()
    grads = [torch.randn(3, 5, 16).to(dtype) for _ in range(2)]
    total = residual + x
    apart = [rms_norm(total, weight, eps=EPS, is_offset=is_offset), total]
    together = add_rms_norm(x, residual, weight=weight, eps=EPS, is_offset=is_offset)
    params = (x, residual, weight)
    for found, expected in zip(
        (*together, *torch.autograd.grad(together, params, grads)),
        (*apart, *torch.autograd.grad(apart, params, grads)),
        strict=True,
    ):
        assert torch.equal(found, expected)
