"""Blocks of attention on a CUDA device: torch's fused kernel against the written-out form."""

import pytest
import torch

from nanotrain.parallel.cp.blocks import KERNELS, WRITTEN_OUT, Block, Kernel, Running

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FUSED = KERNELS["cuda", False, True]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected.float()).abs().max() / expected.float().abs().max()).item()


def in_two_parts(kernel: Kernel, whole: Block, grad: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of causal attention whose first half of keys is taken in after the rest."""
    half = whole.query.shape[2] // 2
    late, early = slice(half, None), slice(0, half)

    def block(rows: slice, columns: slice, is_causal: bool) -> Block:
        query, key, value = whole.query[:, :, rows], whole.key[:, :, columns], whole.value[:, :, columns]
        return Block(query, key, value, None, is_causal, whole.scale)

    running = Running(kernel.attend(block(late, late, True)))
    running.add(kernel.attend(block(late, early, False)), slice(0, half))
    attended = type(kernel.attend(block(late, late, True)))(running.out.to(whole.query.dtype), running.lse)
    found = kernel.gradients(block(late, early, False), attended, grad)
    return [attended.out, found.query, found.key, found.value]


@pytest.mark.parametrize("width", [64, 128])
def test_the_fused_kernel_on_cuda_is_the_written_out_form(width: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 256, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    grad = torch.randn(2, 4, 128, width, device="cuda", dtype=torch.bfloat16)
    whole = Block(query, key, value, None, True, scale=width**-0.5)
    found, expected = (in_two_parts(kernel, whole, grad) for kernel in (FUSED, WRITTEN_OUT))
    assert max(distance(one, other) for one, other in zip(found, expected, strict=True)) < 2e-2
