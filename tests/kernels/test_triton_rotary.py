"""The Triton kernel of RoPE against fp64, and a stage of a model with all kernels, in Triton's interpreter.

See test_triton_kernels.py for how to run them.
"""

import os
from dataclasses import replace

import pytest
import torch

from nanotrain.kernels import choice, triton_rotary
from nanotrain.kernels.rotary import rotate
from nanotrain.model.context import BatchContext
from tests.model.building import LLAMA, build, random_batch, randomize

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2}  # bf16 rounds the results
PAIRS = 3  # in blocks of four


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The kernels, for every tensor that they compute from; two programs per token."""
    has_kernel = choice.kernel_for
    monkeypatch.setattr(
        choice, "kernel_for", lambda device, dtype, **options: has_kernel("cuda", dtype, has_triton=True)
    )
    monkeypatch.setattr(triton_rotary, "TILE", 8)


def exact_rotation(x, cos, sin):
    low, high, rest = x.split((PAIRS, PAIRS, x.shape[-1] - 2 * PAIRS), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


@pytest.mark.parametrize("is_per_sample", [False, True])
@pytest.mark.parametrize("width", [6, 11])  # all channels, or a part of them; the rest is more than one block
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotation_and_gradient_equal_fp64(dtype, width, is_per_sample):
    torch.manual_seed(1)
    angles = 3 * torch.randn((2, 5, 1, PAIRS) if is_per_sample else (5, 1, PAIRS))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wide = torch.randn(2, 5, 3, width + 4).to(dtype)
    x = wide[..., 2 : 2 + width].requires_grad_()  # heads are not next to each other, as after a split
    exact = x.detach().double().requires_grad_()
    grad = torch.randn(2, 3, 5, width).to(dtype).transpose(1, 2)
    expected = exact_rotation(exact, cos.double(), sin.double())
    expected.backward(grad.double())
    out = rotate(x, cos=cos, sin=sin)
    out.backward(grad)
    assert out.dtype is dtype and out.is_contiguous()
    for found, wanted in ((out, expected), (x.grad, exact.grad)):
        torch.testing.assert_close(found.double(), wanted.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_gradient_whose_channels_are_expanded():
    cos, sin = (torch.randn(2, 1, PAIRS) for _ in range(2))
    x = torch.randn(1, 2, 1, 6, requires_grad=True)
    rotate(x, cos=cos, sin=sin).sum().backward()
    exact = x.detach().clone().requires_grad_()
    exact_rotation(exact, cos, sin).sum().backward()
    torch.testing.assert_close(x.grad, exact.grad)


@pytest.mark.parametrize("is_offset", [False, True])
def test_a_stage_with_all_kernels_has_the_loss_and_gradients_of_one_without(monkeypatch, is_offset):
    config = replace(LLAMA, rotary_percent=0.5, apply_layernorm_1p=is_offset, qk_layernorm=True)
    model, batch, found = randomize(build(config)), random_batch(), []
    for kernel in ("triton", "torch"):
        if kernel == "torch":
            monkeypatch.setattr(choice, "kernel_for", lambda *args, **options: "torch")
        loss = model(None, BatchContext(batch))
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
