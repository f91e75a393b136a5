"""RMSNorm by factors per row, in eager code and in the form of graphs, against fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nanotrain.kernels import rms_norm

EPS = 1e-3
FORMS = [
    (rms_norm._factors, rms_norm._gradients),
    (rms_norm._factors_in_graph, rms_norm._gradients_in_graph),
]


@pytest.mark.parametrize(("factors_of", "gradients_of"), FORMS, ids=["eager", "graph"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_factors_and_gradients_are_those_of_fp64(
    factors_of: Callable[..., Tensor],
    gradients_of: Callable[..., tuple[Tensor, Tensor]],
    weight_dtype: torch.dtype,
) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 40, generator=draw).bfloat16()
    weight = torch.randn(40, generator=draw).to(weight_dtype)
    grad = torch.randn(2, 7, 40, generator=draw).bfloat16()
    exact_x = x.double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    exact_factors = (exact_x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    (exact_x * exact_factors * exact_weight).backward(grad.double())
    factors = factors_of(x, eps=EPS)
    torch.testing.assert_close(factors.double(), exact_factors.detach(), rtol=1e-6, atol=0)
    grad_x, grad_weight = gradients_of(grad, x=x, weight=weight, factors=factors)
    assert grad_x.dtype == torch.bfloat16
    assert grad_weight.dtype == weight_dtype
    torch.testing.assert_close(grad_x.double(), exact_x.grad, rtol=5e-3, atol=1e-5)
    tolerance = 5e-3 if weight_dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(grad_weight.double(), exact_weight.grad, rtol=tolerance, atol=1e-4)
