"""Invariant forms of norms and elementwise functions."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.model.activations import Glu
from nanotrain.model.invariant_elements import (
    InWholeVectors,
    invariant_layer_norm,
    invariant_rms_norm,
)
from nanotrain.model.norm import LayerNorm, RMSNorm
from nanotrain.parallel.tp.invariant import UnitBlocks

BLOCKS = UnitBlocks(2, block_length=4, num_tokens=16)


def param(tensor: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(tensor)
    parameter.grad_dtype = torch.float64
    return parameter


@pytest.mark.parametrize("is_offset", [False, True])
def test_norms_have_their_values_and_exact_gradients_of_weights(is_offset: bool) -> None:
    x = torch.randn(2, 8, 12)
    weight = torch.randn(12)
    rms = RMSNorm(param(weight.clone()), eps=1e-5, is_offset=is_offset)
    layer = LayerNorm(param(weight.clone()), param(torch.randn(12)), eps=1e-5, is_offset=is_offset)
    for norm, form in ((rms, invariant_rms_norm), (layer, invariant_layer_norm)):
        torch.testing.assert_close(form(norm, x, blocks=BLOCKS), norm(x), rtol=1e-5, atol=1e-5)
        grads = []
        for parts in (x.split(1), x[:, torch.randperm(8)].split((5, 3), dim=1)):
            norm.weight.grad = None
            for part in parts:
                form(norm, part, blocks=BLOCKS).sum().backward()
            grads.append(norm.weight.grad)
        assert grads[0].dtype is torch.float64
        assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("function", [F.silu, F.gelu, Glu(F.silu)])
def test_elementwise_functions_round_alike_at_every_place(function: object) -> None:
    num_inputs = 2 if isinstance(function, Glu) else 1
    inputs = [torch.randn(5, 7 * 37) for _ in range(num_inputs)]
    whole = InWholeVectors(function)
    together = whole(*inputs)
    for size in (7, 37):
        parts = zip(*(x.split(size, 1) for x in inputs), strict=True)
        assert torch.equal(torch.cat([whole(*part) for part in parts], 1), together)
    torch.testing.assert_close(together, function(*inputs))
