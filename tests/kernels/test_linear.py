"""The products of a linear layer equal those of autograd."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain.kernels import linear as linear_module
from nanotrain.kernels.linear import Linear, Linears, adds_wider, wgrad

T, I, O = 6, 5, 3  # noqa: E741


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_the_products_of_a_layer_are_those_of_autograd(has_bias: bool, is_frozen: bool) -> None:
    weight = nn.Parameter(draw(O, I), requires_grad=not is_frozen)
    bias = nn.Parameter(draw(O)) if has_bias else None
    linear, x, grad = Linear(weight, bias), draw(T, I).requires_grad_(), draw(T, O)

    out = linear.fprop(x)
    expected = torch.autograd.grad(out, [x, *linear.trained_params], grad)

    assert len(linear.trained_params) == has_bias + (not is_frozen)
    actual = [Linears([linear]).dgrad([grad]), *linear.wgrad(grad, x.detach())]
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, reference)


def test_the_input_gradients_of_several_layers_add_up() -> None:
    first, second = (Linear(nn.Parameter(draw(O, I) * factor), None) for factor in (1, 2))
    grad = draw(T, O)
    torch.testing.assert_close(
        Linears([first, second]).dgrad([grad, grad]), 3 * grad @ first.weight.detach()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_gradient_accumulates_into_fp32(dtype: torch.dtype) -> None:
    grad, x = draw(T, O).to(dtype), draw(T, I).to(dtype)
    total = torch.ones(O, I)
    assert wgrad(grad, x, add_to=total) is total
    torch.testing.assert_close(total, 1 + wgrad(grad, x).float(), rtol=1e-2, atol=1e-2)


def test_where_cublas_adds_in_fp32_the_product_is_added_where_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_module, "adds_wider", lambda device_type: True)
    grad, x = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((T, O), (T, I))
    )
    total = torch.empty(O, I, device="meta")
    called = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.is_view:
                return func(*args, **(kwargs or {}))
            called.append((str(func), args[0] is total and kwargs["out"] is total))
            return total  # torch 2.10 cannot compute it on the meta device

    with Record():
        assert wgrad(grad, x, add_to=total) is total
    assert called == [("aten.addmm.dtype_out", True)]
    assert not adds_wider("cpu")


def test_16_bit_products_are_added_to_fp32_some_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_module, "CAST_ELEMENTS", 24)
    grad, x, total = torch.randn(9, 10).bfloat16(), torch.randn(9, 8).bfloat16(), torch.randn(10, 8)
    expected, cast = total + grad.t() @ x, []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            cast.extend([len(args[0])] if func is torch.ops.aten.add_.Tensor else [])
            return func(*args, **(kwargs or {}))

    with Record():
        assert wgrad(grad, x, add_to=total) is total
    assert torch.equal(total, expected) and cast == [3, 3, 3, 1]
