"""A call that runs again keeps its inputs only, and its second run is checked against the first."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nanotrain.memory.run_again import call_again

again = partial(call_again, options={}, around=nullcontext)


def leaf(numel: int = 64) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(3)).requires_grad_()


def test_the_second_run_has_the_random_numbers_of_the_first_and_the_rest_go_on():
    x = leaf()
    torch.manual_seed(0)
    out = again(lambda x: F.dropout(x.sin(), 0.5) * 3, [x])
    following = torch.rand(2)
    (grad,) = torch.autograd.grad(out.sum(), [x])
    assert torch.equal(grad == 0, out == 0) and (grad == 0).any()
    torch.manual_seed(0)
    F.dropout(x, 0.5)
    assert torch.equal(following, torch.rand(2))


def test_tensors_and_other_arguments_by_position_and_by_name():
    x, y = leaf(), leaf() * 2

    def function(x: Tensor, power: int, *, other: Tensor, scale: float) -> Tensor:
        return (x**power * other.exp()).sin() * scale

    expected = torch.autograd.grad(function(x, 3, other=y, scale=2.0).sum(), [x])
    got = torch.autograd.grad(again(function, [x, 3], options={"other": y, "scale": 2.0}).sum(), [x])
    assert torch.equal(expected[0], got[0])


def test_calls_inside_of_calls():
    x, weight = leaf().view(8, 8), torch.eye(8, requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        return (x @ weight).sin().exp()

    def outer(x: Tensor) -> Tensor:
        return again(inner, [again(inner, [x])]).cos()

    expected = torch.autograd.grad(inner(inner(x)).cos().sum(), [x, weight])
    got = torch.autograd.grad(again(outer, [x]).sum(), [x, weight])
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


def test_a_tensor_of_the_second_run_is_freed_when_its_operation_has_read_it():
    x, alive, references = leaf(), [], []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:  # between the backward of cos and that of sin
            alive.append([not reference.expired() for reference in references[-2:]])
            return grad

    def function(x: Tensor) -> Tensor:
        first = x * 1.5
        second = Watch.apply(first.sin())
        references.extend(StorageWeakRef(each.untyped_storage()) for each in (first, second))
        return second.cos()

    again(lambda x: function(x) * 1.0, [x]).sum().backward()
    assert alive == [[True, False]]


def test_the_inputs_are_freed_by_the_backward():
    x = leaf()
    before = x.sin()
    reference = StorageWeakRef(before.untyped_storage())
    out = again(torch.cos, [before])
    del before
    assert not reference.expired()
    out.sum().backward()
    assert reference.expired()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x: x.sin(), "saved 2 tensors and 1 when it ran again"),
        (lambda x: x[:3].sin().sin(), r"ran again, \(torch.Size\(\[3\]\), torch.float32\) as tensor 0"),
    ],
)
def test_a_second_run_that_differs_is_an_error(second, message):
    runs = []

    def function(x: Tensor) -> Tensor:
        runs.append(1)
        return x.sin().sin() if len(runs) == 1 else second(x)

    out = again(function, [leaf()])
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()


def test_a_second_backward_is_an_error():
    x = leaf()
    out = again(torch.sin, [x]).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="read twice"):
        out.backward()
