"""SwiGLU in torch's operators: autograd's values to the bit, and two kept tensors instead of three."""

import pytest
import torch
import torch.nn.functional as F

from nanotrain.kernels.side_by_side import order_of_sides
from nanotrain.kernels.swiglu import swiglu


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_autograd_and_two_tensors_are_kept(
    dtype: torch.dtype, is_joined: bool
) -> None:
    torch.manual_seed(1)
    up, gate = (x.data for x in torch.randn(5, 66).to(dtype).split(33, -1))
    gate, up = (x if is_joined else x.contiguous() for x in (gate, up))
    gate.requires_grad_(), up.requires_grad_()
    grad = torch.randn(33, 5).to(dtype).t()
    expected = F.silu(gate) * up
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = swiglu(gate, up)
    assert [x.data_ptr() for x in kept] == [gate.data_ptr(), up.data_ptr()]
    grads = torch.autograd.grad(out, (gate, up), grad)
    assert (order_of_sides(grads) == (1, 0)) == is_joined, "slices of one tensor where gate and up are"
    for one, other in zip(
        (out, *grads),
        (expected, *torch.autograd.grad(expected, (gate, up), grad)),
        strict=True,
    ):
        assert torch.equal(one, other) or is_joined  # slices are computed row by row, and round otherwise
        torch.testing.assert_close(one, other)
