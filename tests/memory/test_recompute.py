"""Recomputed functions return the same values and gradients, and keep only their inputs, or discard
their outputs.
"""

import pytest
import torch
from torch import Tensor

from nanotrain.memory.recompute import Recompute
from tests.train.saved_tensors import SavedTensors

N = 32


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(N, N, generator=generator).requires_grad_() for _ in range(2))


def chained_products(x: Tensor, *, weight: Tensor) -> Tensor:
    return ((x @ weight).sin() @ weight).sin()


def kept_and_gradients(function, x: Tensor, weight: Tensor) -> tuple[int, list[Tensor]]:
    """Bytes that the graph keeps besides the inputs, and the value with its gradients."""
    saved = SavedTensors([x, weight])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        out = function(x, weight=weight)
    return saved.num_bytes, [out.detach(), *torch.autograd.grad(out.sum(), (x, weight))]


def test_a_checkpointed_function_keeps_its_inputs_only():
    recompute = Recompute()
    plain, values = kept_and_gradients(chained_products, *inputs())
    kept, again = kept_and_gradients(recompute.checkpointed(chained_products), *inputs())
    assert (plain, kept) == (3 * N * N * 4, 0)
    assert all(
        torch.equal(value, reference) for value, reference in zip(values, again, strict=True)
    )


def test_the_second_run_is_marked_also_when_it_stops_early():
    recompute, runs = Recompute(), []

    def function(x: Tensor) -> Tensor:
        runs.append(recompute.is_recomputing)
        out = x.sin()
        runs.append("complete")  # the second run stops at the last saved tensor
        return out

    x = torch.ones(2, requires_grad=True)
    recompute.checkpointed(function)(x).sum().backward()
    assert runs == [False, "complete", True]
    assert not recompute.is_recomputing


def test_without_gradients_a_function_runs_once():
    runs = []
    function = Recompute().checkpointed(lambda x: runs.append(1) or x * 2)
    with torch.no_grad():
        assert function(torch.ones(2)).tolist() == [2, 2]
    assert len(runs) == 1


def chained(first, second, recompute: Recompute | None = None):
    """Both functions, one after the other; what the first returns is discarded."""
    first, second = (recompute or Recompute()).discarding(first, second=second)

    def run(*inputs, **options):
        outputs = first(*inputs)
        return second(*(outputs if isinstance(outputs, tuple) else (outputs,)), **options)

    return run


def test_the_random_state_is_neither_saved_nor_set(monkeypatch: pytest.MonkeyPatch):
    calls = []
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch, name, lambda *_, name=name: calls.append(name))
    x, weight = inputs()
    Recompute().checkpointed(chained_products)(x, weight=weight).sum().backward()
    assert calls == []


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
    chain = chained(lambda x: runs.append(1) or scaled_sine(x), products)
    saved = SavedTensors([x, *matrices])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        out = chain(x, matrices=matrices)
    assert saved.num_bytes == 0 and len(runs) == 1
    gradients = torch.autograd.grad(out.sum(), [x, *matrices])
    expected = torch.autograd.grad(
        products(scaled_sine(x), matrices=matrices).sum(), [x, *matrices]
    )
    assert len(runs) == 2 and all(map(torch.equal, gradients, expected))


def test_several_outputs_one_a_view_and_one_empty():
    x, weight = weights(2)

    def first(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high = x.exp().chunk(2)
        return low.sin(), high, x[:0]

    def second(low: Tensor, high: Tensor, nothing: Tensor) -> Tensor:
        return (low * high).sum() + (high @ weight).sum() + (nothing * nothing).sum()

    chain = chained(first, second)
    gradients, expected = (
        torch.autograd.grad(function, [x, weight]) for function in (chain(x), second(*first(x)))
    )
    assert all(
        torch.equal(value, reference) for value, reference in zip(gradients, expected, strict=True)
    )


def test_a_recomputed_second_function_reads_a_discarded_output():
    x, weight = weights(2)
    recompute = Recompute()

    def second(y: Tensor) -> Tensor:
        return (y @ weight).sin()

    chain = chained(scaled_sine, recompute.checkpointed(second), recompute)
    saved = SavedTensors([x, weight])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        out = chain(x)
    assert saved.num_bytes == 0
    gradients = torch.autograd.grad(out.sum(), [x, weight])
    expected = torch.autograd.grad(second(scaled_sine(x)).sum(), [x, weight])
    assert all(
        torch.equal(value, reference) for value, reference in zip(gradients, expected, strict=True)
    )


def test_a_frozen_input_is_passed_through():
    x, weight = weights(2)
    chain = chained(scaled_sine, lambda y: y @ weight)
    (grad,) = torch.autograd.grad(chain(x.detach()).sum(), [weight])
    assert torch.equal(
        grad, torch.autograd.grad((scaled_sine(x.detach()) @ weight).sum(), [weight])[0]
    )
