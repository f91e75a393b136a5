"""Joined weights: one product equals a product per weight, in any order of the rows, written or returned."""

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from nanotrain.kernels.grad_view import GradView, attach
from nanotrain.kernels.joined import JoinedLinears, JoinedWeight, traced_linears
from nanotrain.kernels.linear import Linear, Linears
from tests.kernels.writing_network import draw

T, I, SIZES = 6, 5, (4, 2, 3)  # noqa: E741


def linears_of(buffer: Tensor, order: tuple[int, ...]) -> list[Linear]:
    """Layers of these sizes whose weights are views of the buffer in this order, after one element."""
    weights, start = {}, 1
    for layer in order:
        weights[layer] = nn.Parameter(buffer[start : start + SIZES[layer] * I].view(SIZES[layer], I))
        start += SIZES[layer] * I
    return [Linear(weights[layer], None) for layer in range(len(SIZES))]


def buffer(name: str) -> Tensor:
    return draw(name, 1 + sum(SIZES) * I).double()


def write_into(grads: Tensor, linear: Linear, *, has_grads: Callable[[], bool | None]) -> GradView:
    """Let products of a layer write where its weight lies in another buffer; None: it cannot be written now."""
    start = linear.weight.storage_offset()
    view = grads[start : start + linear.weight.numel()].view_as(linear.weight)
    found = GradView(grads.dtype, lambda: None if has_grads() is None else (view, bool(has_grads())), lambda: None)
    attach(found, linear.weight)
    return found


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_one_product_is_a_product_per_weight(order: tuple[int, ...]) -> None:
    linears = linears_of(buffer("params"), order)
    apart, joined = Linears(linears), JoinedLinears(linears, JoinedWeight.of([linear.weight for linear in linears]))
    x, grads = draw("x", 2, T // 2, I).double(), [draw(f"grad{size}", T, size).double() for size in SIZES]
    outs = joined.fprop(x)
    assert len({out.untyped_storage().data_ptr() for out in outs}) == 1 and not any(out._is_view() for out in outs)
    found = [*outs, joined.dgrad(grads), *joined.wgrad(joined.join(grads), x.flatten(0, 1))]
    expected = [*apart.fprop(x), apart.dgrad(grads), *apart.wgrad(grads, x.flatten(0, 1))]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    # in graphs autograd passes on the same gradients
    traced = traced_linears(x.requires_grad_(), linears, joined=JoinedWeight.of([linear.weight for linear in linears]))
    weights = [linear.weight for linear in linears]
    of_graph = torch.autograd.grad(traced, [x, *weights], [grad.view(2, T // 2, -1) for grad in grads])
    for one, other in zip((*traced, of_graph[0].flatten(0, 1), *of_graph[1:]), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("uses", [(False, False, False), (True, True, True), (False, True, False)])
def test_one_product_writes_or_adds_all_weight_gradients(uses: tuple[bool, ...]) -> None:
    linears, written = linears_of(buffer("params"), (2, 0, 1)), buffer("grads")
    before, can_write = written.clone(), True
    for linear, has_grads in zip(linears, uses, strict=True):
        write_into(written, linear, has_grads=lambda has=has_grads: has if can_write else None)  # type: ignore[misc]
    joined = JoinedWeight.of([linear.weight for linear in linears])
    x, grads = draw("x", T, I).double(), [draw(f"grad{size}", T, size).double() for size in SIZES]
    assert JoinedLinears(linears, joined).wgrad(grads, x) == [None] * 3
    for linear, grad, has_grads in zip(linears, grads, uses, strict=True):
        start = linear.weight.storage_offset()
        range_ = slice(start, start + linear.weight.numel())
        expected = grad.t() @ x + (before[range_].view_as(linear.weight) if has_grads else 0)
        torch.testing.assert_close(written[range_].view_as(linear.weight), expected)
    assert torch.equal(written[:1], before[:1]), "elements of other weights stay"
    can_write = False  # outside of a backward of the wrapper: autograd gets the gradients
    returned = JoinedLinears(linears, joined).wgrad(grads, x)
    torch.testing.assert_close(returned, [grad.t() @ x for grad in grads])


def test_weights_that_are_no_neighbours_are_refused() -> None:
    first, _, last = linears_of(buffer("params"), (0, 1, 2))
    for weights in ([first.weight, last.weight], [first.weight, nn.Parameter(first.weight.detach().clone())]):
        with pytest.raises(AssertionError, match="planned as neighbours"):
            JoinedWeight.of(weights)
