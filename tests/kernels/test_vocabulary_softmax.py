"""The seam of the fused operations: which implementation is chosen, and the torch forms against fp64."""

import pytest
import torch

from nanotrain.kernels.choice import kernel_for, uses_triton
from nanotrain.kernels.swiglu import swiglu
from nanotrain.kernels.vocabulary_softmax import softmax_gradient


@pytest.mark.parametrize(
    ("device", "dtype", "has_triton", "chosen"),
    [
        ("cuda", torch.bfloat16, True, "triton"),
        ("cuda", torch.float32, True, "triton"),
        ("cuda", torch.float64, True, "torch"),
        ("cuda", torch.bfloat16, False, "torch"),
        ("cpu", torch.bfloat16, True, "torch"),
        ("meta", torch.bfloat16, True, "torch"),
    ],
)
def test_triton_runs_on_gpus_in_dtypes_that_it_computes_from(device, dtype, has_triton, chosen):
    assert kernel_for(device, dtype, has_triton=has_triton) == chosen
    assert not uses_triton(torch.zeros(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_form_equals_fp64(dtype):
    torch.manual_seed(1)
    logits = (4 * torch.randn(5, 37)).to(dtype)
    exact, column = logits.double().requires_grad_(), torch.tensor([[0], [36], [3], [4], [5]])
    log_probs = exact.log_softmax(1).gather(1, column)[:, 0]
    (-log_probs.sum()).backward()
    picked, gradient = softmax_gradient(logits, column=column, is_local=torch.ones(5, 1), combine=lambda local: local)
    torch.testing.assert_close(picked.double(), log_probs.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-4, atol=1e-6)
    gate, up = logits, logits.flip(0)
    assert torch.equal(swiglu(gate, up), torch.nn.functional.silu(gate) * up)
