"""Recomputed functions return the same values and gradients, and keep only their inputs."""

import pytest
import torch
from torch import Tensor

from nanotrain.memory.recompute import Recompute
from tests.train.saved_tensors import SavedTensors

N = 64


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
    assert all(torch.equal(one, other) for one, other in zip(values, again, strict=True))


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


def test_only_named_modules_are_wrapped():
    recompute = Recompute(["mlp"])
    assert recompute.wrap("core_attn", chained_products) is chained_products
    assert recompute.wrap("mlp", chained_products) is not chained_products


@pytest.mark.parametrize("modules", [(), ("layernorm",)])
def test_a_chain_is_its_two_functions(modules):
    x, weight = inputs()
    chain = Recompute(modules).chain("layernorm", torch.sin, second=chained_products)
    assert torch.equal(chain(x, weight=weight), chained_products(x.sin(), weight=weight))


def test_the_random_state_is_neither_saved_nor_set(monkeypatch: pytest.MonkeyPatch):
    calls = []
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch, name, lambda *_, name=name: calls.append(name))
    x, weight = inputs()
    Recompute().checkpointed(chained_products)(x, weight=weight).sum().backward()
    assert calls == []
