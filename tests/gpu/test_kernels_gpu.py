"""Operations of kernels/ on a CUDA device against fp64."""

import pytest
import torch

from nanotrain.kernels.linear import wgrad
from nanotrain.kernels.rms_norm import add_rms_norm
from nanotrain.kernels.rotary import rotate
from tests.kernels.writing_network import Network, step, wrap

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_are_added_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    grad, x = (torch.randn(256, size, device="cuda").to(dtype) for size in (64, 48))
    total = torch.randn(64, 48, device="cuda")
    expected = total.double() + grad.double().t() @ x.double()
    assert wgrad(grad, x, add_to=total) is total
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("size", [96, 2048])
@pytest.mark.parametrize("is_offset", [False, True])
def test_the_norm_of_a_sum_and_its_gradients_equal_fp64(size: int, is_offset: bool) -> None:
    torch.manual_seed(2)
    shapes = ((700, size), (700, size), (size,))
    inputs = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grads = [torch.randn(700, size, device="cuda").bfloat16() for _ in range(2)]
    total = exact[0] + exact[1]
    scale = (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normalized = total * scale * (exact[2] + 1 if is_offset else exact[2])
    torch.autograd.backward([normalized, total], [grad.double() for grad in grads])
    found = add_rms_norm(inputs[0], inputs[1], weight=inputs[2], eps=1e-5, is_offset=is_offset)
    torch.autograd.backward(found, grads)
    pairs = [*zip(found, (normalized, total), strict=True)]
    pairs += [(x.grad, y.grad) for x, y in zip(inputs, exact, strict=True)]
    for one, other in pairs:
        torch.testing.assert_close(one.double(), other.detach(), rtol=2e-2, atol=5e-3 * other.abs().max().item())


def test_a_rotation_of_a_part_of_the_channels_equals_fp64() -> None:
    torch.manual_seed(3)
    angles = torch.randn(9, 1, 24, device="cuda")
    x = torch.randn(2, 9, 5, 64, device="cuda").bfloat16()
    low, high, rest = x.double().split((24, 24, 16), dim=-1)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    c, s = cos.double(), sin.double()
    expected = torch.cat((low * c - high * s, high * c + low * s, rest), dim=-1)
    torch.testing.assert_close(rotate(x, cos=cos, sin=sin).double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_compiled_and_eager_products_write_the_gradients_that_autograd_returns(strategy: str) -> None:
    found = []
    for writes, compiles in ((False, False), (True, False), (True, True)):
        torch._dynamo.reset()
        network = Network()
        parallel = wrap(network, writes=writes, dtype=torch.bfloat16, strategy=strategy, device=torch.device("cuda"))
        block = torch.compile(network.short_block, fullgraph=True) if compiles else network.short_block
        network.block = block  # type: ignore[method-assign]
        step(network, parallel)  # the second step overwrites what the first left behind
        found.append(step(network, parallel))
    for written in found[1:]:
        torch.testing.assert_close(written, found[0], rtol=3e-2, atol=3e-2 * found[0].abs().max().item())
