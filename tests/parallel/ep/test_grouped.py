"""Grouped products equal one product per expert, and nothing leaks out of rows that belong to nobody."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from nanotrain.parallel.ep import grouped
from nanotrain.parallel.ep.grouped import KERNELS, GroupedProduct, grouped_linear, pick_kernel
from nanotrain.parallel.tp.weight_grads import WeightGradQueue

INPUTS, OUTPUTS = 16, 24
COUNTS = [[3, 0, 5, 1], [0, 0, 0, 0], [0, 7, 0, 0], [1, 1, 1, 1]]


def parts(counts, tail, *, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(counts) + tail)
    num_rows = sum(counts) + tail
    rows = torch.randn(num_rows, INPUTS, generator=generator).to(dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(len(counts), OUTPUTS, INPUTS, generator=generator).to(dtype))
    grad = torch.randn(num_rows, OUTPUTS, generator=generator).to(dtype)
    return rows, weight, grad, torch.tensor(counts).cumsum(0).to(torch.int32)


def by_hand(rows, weight, counts):
    """[R, O], zero in the tail."""
    expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    used = torch.einsum("ri,roi->ro", rows[: len(expert)], weight[expert])
    return torch.cat([used, torch.zeros(len(rows) - len(expert), OUTPUTS, dtype=rows.dtype)])


class Poisoned:
    """A kernel that leaves NaN where torch leaves whatever was in memory."""

    def times(self, rows, matrices, *, ends):
        out = KERNELS["grouped"].times(rows, matrices, ends=ends)
        out[ends[-1] :] = torch.nan
        return out

    def outer(self, grad, rows, *, ends):
        return KERNELS["grouped"].outer(grad, rows, ends=ends)


@pytest.mark.parametrize("kernel", ["grouped", "looped", "poisoned"])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("tail", [0, 3])
def test_every_kernel_multiplies_each_row_by_its_expert(monkeypatch, kernel, counts, tail):
    monkeypatch.setitem(grouped.KERNELS, "poisoned", Poisoned())
    rows, weight, grad, ends = parts(counts, tail)
    out = grouped_linear(rows, weight, ends=ends, product=GroupedProduct(kernel, may_drop=tail > 0))
    expected = by_hand(rows, weight, counts)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out, (rows, weight), grad)
    for one, other in zip(found, torch.autograd.grad(expected, (rows, weight), grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert (found[0][sum(counts) :] == 0).all()


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_bf16_and_an_expanded_gradient(kernel):
    rows, weight, _, ends = parts(COUNTS[0], 0, dtype=torch.bfloat16)
    out = grouped_linear(rows, weight, ends=ends, product=GroupedProduct(kernel))
    out.sum().backward()
    exact = by_hand(rows.detach().float(), weight.detach().float(), COUNTS[0])
    torch.testing.assert_close(out.float(), exact, rtol=0.02, atol=0.05)
    assert rows.grad.dtype == weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("defers", [False, True])
def test_a_queue_that_defers_gets_the_weight_gradient_and_delivers_it_later(defers):
    rows, weight, grad, ends = parts(COUNTS[0], 0)
    (expected,) = torch.autograd.grad(by_hand(rows, weight, COUNTS[0]), weight, grad)
    queue, fired = WeightGradQueue(), []
    weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter.grad))
    out = grouped_linear(rows, weight, ends=ends, product=GroupedProduct("grouped", weight_grads=queue))
    with queue.defer() if defers else nullcontext():
        out.backward(grad)
    assert rows.grad is not None
    if defers:
        assert weight.grad is None
    queue.take()()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=1e-5)
    assert fired[-1] is weight.grad


def test_sizes_whose_rows_are_not_aligned_are_looped():
    assert pick_kernel(64, 4, dtype=torch.float32) == "grouped"
    assert pick_kernel(64, 4, dtype=torch.bfloat16) == "looped"
    assert pick_kernel(23, 64, dtype=torch.float32) == "looped"


def test_without_a_grouped_product_in_torch_everything_is_looped(monkeypatch):
    monkeypatch.setattr(grouped, "_grouped_mm", None)
    assert pick_kernel(64, 64, dtype=torch.float32) == "looped"
