"""Gradients of router logits by products in bf16 and in fp32, against fp64."""

import torch

from nanotrain.kernels.router_logits import router_gradients, router_logits


def test_products_of_the_gradient_in_bf16_are_those_of_fp64_within_two_to_the_minus_17():
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(96, 16, generator=generator).mul(3).exp()
    grad = torch.randn(96, 16, generator=generator) * spread
    x = torch.randn(96, 32, generator=generator).bfloat16()
    weight = torch.randn(16, 32, generator=generator).bfloat16()
    grad_x, grad_weight = router_gradients(grad, x, weight=weight)
    exact_x = grad.double() @ weight.double()
    exact_weight = grad.double().t() @ x.double()
    # relative to the sum of absolute products; sums in fp32 add a little
    scale = grad.abs().double().t() @ x.abs().double()
    assert ((grad_weight - exact_weight).abs() / scale).max() < 1.1 * 2**-17
    scale = grad.abs().double() @ weight.abs().double()
    assert grad_x.dtype is torch.bfloat16
    assert ((grad_x - exact_x).abs() / scale).max() < 1.1 * 2**-8, "rounded once"


def test_products_of_the_gradient_in_fp16_are_in_fp32():
    grad = torch.full((4, 8), 1e-7)  # 16 bits of fp16 would lose it
    x = torch.ones(4, 16).half()
    grad_x, grad_weight = router_gradients(grad, x, weight=torch.full((8, 16), 1e3).half())
    torch.testing.assert_close(grad_x, torch.full_like(x, 8e-4), rtol=1e-3, atol=0)
    torch.testing.assert_close(grad_weight, torch.full((8, 16), 4e-7))


def test_logits_are_in_fp32_with_gradients_in_the_dtype_of_the_inputs():
    x = torch.randn(2, 3, 16).bfloat16().requires_grad_()
    weight = torch.randn(8, 16).bfloat16().requires_grad_()
    logits = router_logits(x, weight)
    assert logits.dtype is torch.float32 and logits.shape == (2, 3, 8)
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().t())
    logits.sum().backward()
    assert x.grad.dtype is weight.grad.dtype is torch.bfloat16
