"""Grouped products equal one product per expert; dropped tokens contribute nothing."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from nanotrain.kernels import grouped
from nanotrain.kernels.deferred_wgrad import WgradQueue, accumulate_wgrads
from nanotrain.kernels.grouped import (
    GroupedMM,
    GroupedOptions,
    LoopedMM,
    grouped_linear,
    select_gemm,
)

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
    """[R, O], zero for dropped tokens."""
    expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    used = torch.einsum("ri,roi->ro", rows[: len(expert)], weight[expert])
    return torch.cat([used, torch.zeros(len(rows) - len(expert), OUTPUTS, dtype=rows.dtype)])


class PoisonedMM(GroupedMM):
    """Leaves NaN where torch leaves uninitialized memory."""

    def fprop(self, x, weight, *, offs):
        return self.poison(super().fprop(x, weight, offs=offs), offs)

    def dgrad(self, grad, weight, *, offs):
        return self.poison(super().dgrad(grad, weight, offs=offs), offs)

    def poison(self, out, offs):
        out[offs[-1] :] = torch.nan
        return out


class UnwrittenMM(GroupedMM):
    """Leaves NaN in the weight gradients of experts without tokens, as torch on some GPUs."""

    def multiply(self, a, b, *, offs):
        out = super().multiply(a, b, offs=offs)
        if out.ndim == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out


@pytest.mark.parametrize(
    ("capability", "is_zeroed"), [((9, 0), False), ((10, 0), True), ((12, 0), True)]
)
def test_weight_gradients_without_tokens_are_zero_where_torch_leaves_memory(
    capability, is_zeroed, monkeypatch
):
    monkeypatch.setattr(grouped, "compute_capability", lambda _: capability)
    rows, weight, grad, offs = parts([3, 0, 5, 0], 0)
    out = grouped_linear(rows, weight, offs=offs, options=GroupedOptions(UnwrittenMM()))
    (actual,) = torch.autograd.grad(out, weight, grad)
    (expected,) = torch.autograd.grad(by_hand(rows, weight, [3, 0, 5, 0]), weight, grad)
    torch.testing.assert_close(actual[[0, 2]], expected[[0, 2]])
    assert (actual[[1, 3]] == 0).all() == is_zeroed


@pytest.mark.parametrize("gemm", [GroupedMM(), LoopedMM(), PoisonedMM()])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("tail", [0, 3])
def test_every_gemm_multiplies_each_token_by_its_expert(gemm, counts, tail):
    rows, weight, grad, offs = parts(counts, tail)
    out = grouped_linear(rows, weight, offs=offs, options=GroupedOptions(gemm, may_drop=tail > 0))
    expected = by_hand(rows, weight, counts)
    torch.testing.assert_close(out, expected)
    actual = torch.autograd.grad(out, (rows, weight), grad)
    for value, reference in zip(
        actual, torch.autograd.grad(expected, (rows, weight), grad), strict=True
    ):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)
    assert (actual[0][sum(counts) :] == 0).all()


@pytest.mark.parametrize("gemm", [GroupedMM(), LoopedMM()])
def test_bf16_and_an_expanded_gradient(gemm):
    rows, weight, _, offs = parts(COUNTS[0], 0, dtype=torch.bfloat16)
    out = grouped_linear(rows, weight, offs=offs, options=GroupedOptions(gemm))
    out.sum().backward()
    exact = by_hand(rows.detach().float(), weight.detach().float(), COUNTS[0])
    torch.testing.assert_close(out.float(), exact, rtol=0.02, atol=0.05)
    assert rows.grad.dtype == weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("defers", [False, True])
def test_a_queue_that_defers_accumulates_the_weight_gradient_later(defers):
    rows, weight, grad, offs = parts(COUNTS[0], 0)
    (expected,) = torch.autograd.grad(by_hand(rows, weight, COUNTS[0]), weight, grad)
    queue, fired = WgradQueue(), []
    weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter.grad))
    out = grouped_linear(
        rows, weight, offs=offs, options=GroupedOptions(GroupedMM(), wgrad_queue=queue)
    )
    with queue.defer() if defers else nullcontext():
        out.backward(grad)
    assert rows.grad is not None
    if defers:
        assert weight.grad is None
    accumulate_wgrads(queue.take())
    torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=1e-5)
    assert fired[-1] is weight.grad


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype", "expected"),
    [
        (64, 4, torch.float32, GroupedMM),
        (64, 4, torch.bfloat16, LoopedMM),
        (23, 64, torch.float32, LoopedMM),
    ],
)
def test_weights_with_unaligned_rows_are_looped(outputs, inputs, dtype, expected):
    assert type(select_gemm(torch.empty(2, outputs, inputs, dtype=dtype))) is expected


def test_without_tokens_torch_is_not_called(monkeypatch):
    monkeypatch.setattr(grouped, "_grouped_mm", None)
    rows, weight, grad, offs = parts([0, 0, 0], 0)
    out = grouped_linear(rows, weight, offs=offs, options=GroupedOptions(GroupedMM()))
    actual = torch.autograd.grad(out, (rows, weight), grad)
    assert out.shape == (0, OUTPUTS) and actual[0].shape == rows.shape
    assert torch.equal(actual[1], torch.zeros_like(weight))


@pytest.mark.parametrize("gemm", [GroupedMM(), LoopedMM()])
def test_16_bit_products_on_a_cpu_are_over_multiples_of_64_tokens(gemm, monkeypatch):
    shapes = []
    real = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: shapes.append((a.shape, b.shape)) or real(a, b)
    )
    counts = [70, 0, 3, 64]
    rows, weight, grad, offs = parts(counts, 2, dtype=torch.bfloat16)
    out = grouped_linear(rows, weight, offs=offs, options=GroupedOptions(gemm, may_drop=True))
    actual = torch.autograd.grad(out, (rows, weight), grad)
    assert {a[0] for a, b in shapes[:8]} == {128, 0, 64} and {b[0] for a, b in shapes[8:]} == {
        128,
        0,
        64,
    }
    monkeypatch.undo()
    expected = by_hand(rows.float(), weight.float(), counts)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    for value, reference in zip(
        actual, torch.autograd.grad(expected, (rows, weight), grad.float()), strict=True
    ):
        torch.testing.assert_close(value, reference, rtol=2e-2, atol=1e-1)


class FilledView:
    """A gradient buffer that holds what was there before."""

    def __init__(self, buffer, has_grads):
        self.buffer = buffer
        self.has_grads = has_grads

    def start_write(self):
        return self.buffer, self.has_grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("has_grads", [False, True])
@pytest.mark.parametrize("gemm", [GroupedMM(), LoopedMM()])
def test_what_is_written_for_an_expert_without_tokens_is_zero_or_what_was_there(
    gemm, dtype, counts, has_grads
):
    rows, weight, grad, offs = parts(counts, 0, dtype=dtype)
    before = torch.full(weight.shape, 7.0 if has_grads else torch.nan)
    view = FilledView(before.clone(), has_grads)
    x = rows.detach()
    assert gemm.accumulate_wgrad(grad, x, offs=offs, view=view)
    (expected,) = torch.autograd.grad(
        by_hand(rows.float(), weight.float(), counts), weight, grad.float(), allow_unused=True
    )
    expected = expected.float() + (7.0 if has_grads else 0.0)
    torch.testing.assert_close(view.buffer, expected, rtol=1e-2, atol=1e-2)
    for expert, count in enumerate(counts):
        if count == 0:
            assert (view.buffer[expert] == (7.0 if has_grads else 0.0)).all()
