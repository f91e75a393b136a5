"""Products by oneDNN equal torch's, gradients included, and run where they gain."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.kernels import onednn
from nanotrain.kernels.linear import Linear, dgrad, fprop, wgrad
from nanotrain.kernels.onednn import uses_onednn

B, S, I, O = 2, 64, 24, 40  # noqa: E741

pytestmark = pytest.mark.skipif(onednn._OPERATOR is None, reason="this torch has no oneDNN")


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def on_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


@pytest.fixture
def for_every_size(on_avx512: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """oneDNN multiplies matrices of every size; the elements of each left operand."""
    sizes: list[int] = []
    multiply = onednn.multiply

    def record(x: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
        sizes.append(x.numel())
        return multiply(x, weight, bias=bias)

    monkeypatch.setattr(onednn, "MIN_PRODUCTS", 0)
    monkeypatch.setattr(onednn, "multiply", record)
    return sizes


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_linear_layer_and_its_gradients_are_those_of_torch(
    has_bias: bool, is_frozen: bool, for_every_size: list[int]
) -> None:
    weight = nn.Parameter(draw(O, I), requires_grad=not is_frozen)
    bias = nn.Parameter(draw(O)) if has_bias else None
    x, grad, linear = draw(B, S, I).requires_grad_(), draw(B, S, O), Linear(weight, bias)
    inputs = [x, *linear.trained_params]

    out, expected = linear.fprop(x), F.linear(x, weight, bias)

    torch.testing.assert_close(out, expected)
    pairs = zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other)
    assert len(for_every_size) == (2 if is_frozen else 3)


def test_second_derivatives_are_those_of_torch(for_every_size: list[int]) -> None:
    x, weight, found = draw(B, S, I).requires_grad_(), draw(O, I).requires_grad_(), []
    for multiply in (fprop, F.linear):
        first = torch.autograd.grad(multiply(x, weight).square().sum(), [x, weight], create_graph=True)
        found.append(torch.autograd.grad(sum(grad.square().sum() for grad in first), [x, weight]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-2 * float(other.abs().mean()))
    assert len(for_every_size) > 3


def test_autocast_keeps_torchs_products(on_avx512: None) -> None:
    x, weight = draw(64, I), draw(2**22 // (64 * I) + 1, I)
    with torch.autocast("cpu", torch.bfloat16):
        assert fprop(x, weight).dtype is torch.bfloat16


def test_products_are_added_in_place(for_every_size: list[int]) -> None:
    grad, x, weight = draw(S, O), draw(S, I), draw(O, I)
    for product, expected in (
        (lambda total: dgrad(grad, weight, add_to=total), grad @ weight),
        (lambda total: wgrad(grad, x, add_to=total), grad.t() @ x),
    ):
        total = torch.ones_like(expected)
        assert product(total) is total
        torch.testing.assert_close(total, 1 + expected)
        torch.testing.assert_close(product(None), expected)
    assert len(for_every_size) == 4


def test_expanded_gradients_and_slices_of_a_weight_are_multiplied(for_every_size: list[int]) -> None:
    x, weight = draw(B, S, I).requires_grad_(), draw(O, I).requires_grad_()
    grads = [torch.autograd.grad(multiply(x, weight[8:]).sum(), [x, weight]) for multiply in (fprop, F.linear)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    assert len(for_every_size) == 3


def test_small_products_other_dtypes_and_odd_numbers_of_tokens_are_those_of_torch(on_avx512: None) -> None:
    size = 2**22 // (64 * I) + 1
    assert uses_onednn(draw(64, I), size)
    assert not uses_onednn(draw(64, I), size - 2)
    assert not uses_onednn(draw(63, I), 2 * size)
    assert not uses_onednn(draw(64, I).bfloat16(), size)
    assert not uses_onednn(draw(64, I).double(), size)
    assert not uses_onednn(torch.empty(64, I, device="meta"), size)


def test_cpus_without_avx512_keep_torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not uses_onednn(draw(64, I), 2**22)
