"""The Triton kernels of SwiGLU against fp64, in Triton's interpreter."""

import os

import pytest
import torch

from nanotrain.kernels import triton_swiglu
from nanotrain.model import activations

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_output_and_gradients_equal_fp64(monkeypatch: pytest.MonkeyPatch, dtype, rounding) -> None:
    monkeypatch.setattr(triton_swiglu, "BLOCK", 16)
    monkeypatch.setattr(activations, "runs_triton", lambda x: x.dtype is not torch.float64)
    torch.manual_seed(0)
    # the last block is not full
    inputs = [torch.randn(3, 7).to(dtype).requires_grad_() for _ in range(2)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad, results = torch.randn(3, 7).to(dtype), []
    for gate, up in (inputs, exact):
        out = activations.swiglu(gate, up)
        results.append([out, *torch.autograd.grad(out, (gate, up), grad.to(out.dtype))])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=rounding, atol=rounding)
