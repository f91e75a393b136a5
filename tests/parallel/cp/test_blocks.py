"""Parts of attention put together are attention to all keys, by torch's kernel and written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.parallel.cp.blocks import (
    KERNELS,
    WRITTEN_OUT,
    Attended,
    Block,
    Kernel,
    Running,
    attend_block,
    block_gradients,
)

FUSED = KERNELS["cpu", False, False]
KERNELS_HERE = {"fused": FUSED, "written out": WRITTEN_OUT}


def block(*, keys: int, mask: torch.Tensor | None = None, is_causal: bool = False, seed: int = 0) -> Block:
    generator = torch.Generator().manual_seed(seed)

    def numbers(length: int) -> torch.Tensor:
        return torch.randn(2, 3, length, 8, generator=generator, dtype=torch.float64)

    return Block(numbers(5), numbers(keys), numbers(keys), mask, is_causal, scale=0.3)


def masks(*, keys: int, seed: int) -> torch.Tensor:
    """Some rows see all keys, some none."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(2, 1, 5, keys, generator=generator) < torch.rand(2, 1, 5, 1, generator=generator).round()


@given(st.integers(1, 7), st.integers(0, 100))
def test_the_fused_kernel_is_the_written_out_form(keys, seed):
    for masked in (None, masks(keys=keys, seed=seed)):
        given_block = block(keys=keys, mask=masked, seed=seed)
        fused, plain = (kernel.attend(given_block) for kernel in (FUSED, WRITTEN_OUT))
        seen = torch.ones(2, 1, 5, dtype=torch.bool) if masked is None else masked.any(-1)
        torch.testing.assert_close(fused.out * seen[..., None], plain.out * seen[..., None])
        torch.testing.assert_close(fused.lse, plain.lse)
        # the whole that a block is a part of has a larger log-sum-exp
        whole = Attended(plain.out, plain.lse.clamp(min=0) + 1)
        gradients = (
            kernel.gradients(given_block, whole, grad=torch.ones_like(plain.out)) for kernel in (FUSED, WRITTEN_OUT)
        )
        for one, other in zip(*(vars(found).values() for found in gradients), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kernel", KERNELS_HERE.values(), ids=KERNELS_HERE)
def test_parts_put_together_are_the_whole(kernel: Kernel):
    # Given keys in three parts, of which the second is hidden from every query and the third from some
    whole = block(keys=9, mask=torch.ones(2, 1, 5, 9, dtype=torch.bool))
    whole.mask[..., 3:6] = False
    whole.mask[:, :, 2:, 6:] = False
    parts = [
        Block(whole.query, whole.key[:, :, cut], whole.value[:, :, cut], whole.mask[..., cut], False, whole.scale)
        for cut in (slice(0, 3), slice(3, 6), slice(6, 9))
    ]
    # when they are taken in one after the other
    running = Running(kernel.attend(parts[0]))
    for further in parts[1:]:
        running.add(kernel.attend(further), slice(0, 5))
    # then output and log-sum-exp are those of the whole, and the gradients add up to the whole's.
    expected = WRITTEN_OUT.attend(whole)
    torch.testing.assert_close(running.out, expected.out)
    torch.testing.assert_close(running.lse, expected.lse)
    grad = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    found = [kernel.gradients(further, expected, grad=grad) for further in parts]
    all_at_once = WRITTEN_OUT.gradients(whole, expected, grad=grad)
    torch.testing.assert_close(sum(part.query for part in found), all_at_once.query)
    torch.testing.assert_close(torch.cat([part.key for part in found], dim=2), all_at_once.key)
    torch.testing.assert_close(torch.cat([part.value for part in found], dim=2), all_at_once.value)


@pytest.mark.parametrize("value_width", [4, 8, 12])
def test_written_out_gradients_are_those_of_autograd(value_width):
    given_block = block(keys=5, is_causal=True)
    query, key = (x.clone().requires_grad_() for x in (given_block.query, given_block.key[:, :1]))
    value = torch.randn(2, 1, 5, value_width, dtype=torch.float64, requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key.expand(2, 3, 5, 8), value.expand(2, 3, 5, -1), is_causal=True, scale=0.3
    )
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (query, key, value), grad)
    shared = Block(query.detach(), key.detach(), value.detach(), None, True, scale=0.3)
    whole = attend_block(shared)
    torch.testing.assert_close(whole.out, out.detach())
    found = block_gradients(shared, whole, grad=grad)
    for one, other in zip((found.query, found.key, found.value), expected, strict=True):
        torch.testing.assert_close(one, other)
