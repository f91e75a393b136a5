"""The output of the first of two functions is neither kept nor different when it is read in the backward."""

import torch
from torch import Tensor

from nanotrain.memory.recompute import Recompute
from tests.train.saved_tensors import SavedTensors

N = 32


def weights(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(N, N, generator=generator).requires_grad_() for _ in range(count)]


def scaled_sine(x: Tensor) -> Tensor:
    return x.sin() * 2


def products(y: Tensor, *, matrices: list[Tensor]) -> Tensor:
    """Saves its input once per matrix, once as a view."""
    return sum((y @ matrix for matrix in matrices), start=y.t() @ matrices[0])


def test_an_output_that_is_saved_several_times_is_recomputed_once():
    x, *matrices = weights(4)
    runs = []
    chain = Recompute(["layernorm"]).chain("layernorm", lambda x: runs.append(1) or scaled_sine(x), second=products)
    saved = SavedTensors([x, *matrices])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        out = chain(x, matrices=matrices)
    assert not saved.tensors and len(runs) == 1
    gradients = torch.autograd.grad(out.sum(), [x, *matrices])
    expected = torch.autograd.grad(products(scaled_sine(x), matrices=matrices).sum(), [x, *matrices])
    assert len(runs) == 2 and all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


def test_several_outputs_one_a_view_and_one_empty():
    x, weight = weights(2)

    def first(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high = x.exp().chunk(2)
        return low.sin(), high, x[:0]

    def second(low: Tensor, high: Tensor, nothing: Tensor) -> Tensor:
        return (low * high).sum() + (high @ weight).sum() + (nothing * nothing).sum()

    chain = Recompute(["mla_up_proj"]).chain("mla_up_proj", first, second=second)
    gradients, expected = (torch.autograd.grad(function, [x, weight]) for function in (chain(x), second(*first(x))))
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


def test_a_recomputed_second_function_reads_a_discarded_output():
    x, weight = weights(2)
    recompute = Recompute(["layernorm", "mlp"])

    def second(y: Tensor) -> Tensor:
        return (y @ weight).sin()

    chain = recompute.chain("layernorm", scaled_sine, second=recompute.wrap("mlp", second))
    saved = SavedTensors([x, weight])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        out = chain(x)
    assert not saved.tensors
    gradients = torch.autograd.grad(out.sum(), [x, weight])
    expected = torch.autograd.grad(second(scaled_sine(x)).sum(), [x, weight])
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


def test_a_frozen_input_is_passed_through():
    x, weight = weights(2)
    chain = Recompute(["layernorm"]).chain("layernorm", scaled_sine, second=lambda y: y @ weight)
    (grad,) = torch.autograd.grad(chain(x.detach()).sum(), [weight])
    assert torch.equal(grad, torch.autograd.grad((scaled_sine(x.detach()) @ weight).sum(), [weight])[0])
