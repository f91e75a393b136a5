"""The torch forms of the rotation: in passes, and as the formula that a compiler sees, against fp64."""

import pytest
import torch

from nanotrain.kernels.rotary import rotate


@pytest.mark.parametrize("is_compiling", [False, True])
@pytest.mark.parametrize("is_per_sample", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_pairs_rotate_as_complex_numbers_and_the_gradient_rotates_back(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, is_per_sample: bool, is_compiling: bool
) -> None:
    torch.manual_seed(1)
    angles = 3 * torch.randn((2, 5, 1, 3) if is_per_sample else (5, 1, 3), dtype=torch.float64)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    x, grad = torch.randn(2, 5, 4, 9).to(dtype).requires_grad_(), torch.randn(2, 5, 4, 9).to(dtype)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    out = rotate(x, cos=cos, sin=sin)
    out.backward(grad)
    for given, found, turn in ((x, out, angles), (grad, x.grad, -angles)):
        low, high, rest = given.detach().double().split((3, 3, 3), dim=-1)
        turned = torch.complex(low, high) * torch.polar(torch.ones_like(turn), turn)
        expected = torch.cat((turned.real, turned.imag, rest), dim=-1)
        torch.testing.assert_close(found.detach().double(), expected, rtol=tolerance, atol=tolerance)
