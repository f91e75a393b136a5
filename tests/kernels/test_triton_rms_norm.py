"""The Triton kernels of RMSNorm against fp64, in Triton's interpreter (see test_triton_kernels.py)."""

import os

import pytest
import torch

from nanotrain.kernels import choice, triton_rms_norm
from nanotrain.kernels.rms_norm import add_rms_norm, rms_norm
from tests.train.saved_tensors import SavedTensors

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}  # bf16 rounds the results
SHAPE = (3, 3, 11)  # nine rows of eleven: tiles of two rows, three tiles per program, the last one past the end
EPS = 1e-3


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The kernels, for every tensor; two programs in the backward."""
    monkeypatch.setattr(choice, "kernel_for", lambda *args, **options: "triton")
    monkeypatch.setattr(triton_rms_norm, "TILE", 32)
    monkeypatch.setattr(triton_rms_norm, "PROGRAMS", 2)


def exact_norm(x, weight, *, is_offset):
    scale = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x * scale * (weight + 1 if is_offset else weight)


def drawn(dtype, *shape):
    """A tensor of this dtype, and the same in fp64; both require a gradient."""
    x = torch.randn(shape).to(dtype)
    return x.clone().requires_grad_(), x.double().requires_grad_()


def assert_equal(found, exact, dtype):
    torch.testing.assert_close(found.double(), exact.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_norm_and_its_gradients_equal_fp64(dtype, is_offset):
    torch.manual_seed(1)
    (x, exact_x), (weight, exact_weight) = drawn(dtype, *SHAPE), drawn(dtype, SHAPE[-1])
    grad = torch.randn(SHAPE).to(dtype)
    expected = exact_norm(exact_x, exact_weight, is_offset=is_offset)
    expected.backward(grad.double())
    out = rms_norm(x, weight, eps=EPS, is_offset=is_offset)
    out.backward(grad)
    assert out.dtype is dtype
    for found, exact in ((out, expected), (x.grad, exact_x.grad), (weight.grad, exact_weight.grad)):
        assert_equal(found, exact, dtype)


@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_norm_of_a_sum_and_its_gradients_equal_fp64(dtype, is_offset):
    torch.manual_seed(2)
    (x, exact_x), (residual, exact_residual) = drawn(dtype, *SHAPE), drawn(dtype, *SHAPE)
    weight, exact_weight = drawn(dtype, SHAPE[-1])
    grads = [torch.randn(SHAPE).to(dtype) for _ in range(2)]
    exact_total = exact_x + exact_residual
    expected = exact_norm(exact_total, exact_weight, is_offset=is_offset)
    torch.autograd.backward([expected, exact_total], [grad.double() for grad in grads])
    out, total = add_rms_norm(x, residual, weight=weight, eps=EPS, is_offset=is_offset)
    torch.autograd.backward([out, total], grads)
    if dtype is torch.float32:  # the interpreter cuts bf16 off, where GPUs round
        assert torch.equal(total, x + residual)
    pairs = [(total, exact_total), (out, expected), (x.grad, exact_x.grad), (residual.grad, exact_residual.grad)]
    for found, exact in [*pairs, (weight.grad, exact_weight.grad)]:
        assert_equal(found, exact, dtype)


def test_a_strided_input_and_a_gradient_that_is_expanded():
    torch.manual_seed(3)
    wide, exact_wide = drawn(torch.float32, 4, 24)
    weight, exact_weight = drawn(torch.float32, 11)
    rms_norm(wide[:, 5:16], weight, eps=EPS).sum().backward()
    exact_norm(exact_wide[:, 5:16], exact_weight, is_offset=False).sum().backward()
    assert_equal(wide.grad, exact_wide.grad, torch.float32)
    assert_equal(weight.grad, exact_weight.grad, torch.float32)


def test_no_rows_and_rows_longer_than_the_registers_hold(monkeypatch):
    weight = torch.ones(11, requires_grad=True)
    rms_norm(torch.ones(0, 11), weight, eps=EPS).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(11))
    monkeypatch.setattr(triton_rms_norm, "MAX_SIZE", 10)
    monkeypatch.setattr(triton_rms_norm, "forward", None)
    assert torch.allclose(rms_norm(torch.ones(2, 11), weight, eps=0.0), torch.ones(2, 11))


def test_it_keeps_no_more_than_the_torch_form(monkeypatch):
    x, residual = (torch.randn(4, 11, requires_grad=True) for _ in range(2))
    weight, kept = torch.ones(11, requires_grad=True), []
    for kernel in ("triton", "torch"):
        monkeypatch.setattr(choice, "kernel_for", lambda *args, kernel=kernel, **options: kernel)
        saved = SavedTensors([weight])
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            out = add_rms_norm(x, residual, weight=weight, eps=EPS)
        kept.append(saved.num_bytes)
        del out
    assert kept == [4 * 11 * 4 + 4 * 4] * 2  # the sum, and a number per row
