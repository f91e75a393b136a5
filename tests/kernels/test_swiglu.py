"""SwiGLU in torch's operators: autograd's values to the bit, and two kept tensors instead of three."""

import pytest
import torch
import torch.nn.functional as F

from nanotrain.kernels.swiglu import swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_autograd_and_two_tensors_are_kept(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    gate, up = (torch.randn(5, 33).to(dtype).requires_grad_() for _ in range(2))
    grad = torch.randn(33, 5).to(dtype).t()
    expected = F.silu(gate) * up
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = swiglu(gate, up)
    assert [x.data_ptr() for x in kept] == [gate.data_ptr(), up.data_ptr()]
    grads = torch.autograd.grad(out, (gate, up), grad)
    for one, other in zip(
        (out, *grads),
        (expected, *torch.autograd.grad(expected, (gate, up), grad)),
        strict=True,
    ):
        assert torch.equal(one, other)
