"""Compiled graphs write weight gradients to the gradient buffer, to the bit as autograd returns
them.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanotrain.kernels import linear
from nanotrain.kernels.linear import grad_view_of
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.layout import LayoutRules
from tests.kernels.writing_network import Network, draw, step, wrap


def compiled(
    *, strategy: str = "optim", writes: bool = True, **options: LayoutRules
) -> tuple[Network, DataParallel, list[str]]:
    """A network with a compiled block, and the weights that graphs write."""
    torch._dynamo.reset()
    network, written = Network(), []
    parallel = wrap(network, writes=writes, dtype=torch.bfloat16, strategy=strategy, **options)
    network.block = torch.compile(network.short_block, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]

    def record(
        name: str, start: Callable[[], tuple[Tensor, bool] | None]
    ) -> tuple[Tensor, bool] | None:
        written.append(name)
        return start()

    for name, param in network.named_parameters():
        view = grad_view_of(param)
        for field in ("start_write", "start_write_in_graph"):
            # the same object is found from the storage
            if view is not None and getattr(view, field) is not None:
                object.__setattr__(view, field, partial(record, name, getattr(view, field)))
    return network, parallel, written


@pytest.mark.skipif(not linear.CAN_TRACE, reason="graphs write none with torch 2.10")
def test_graphs_write_to_the_bit_what_autograd_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    network, parallel, written = compiled()
    step(network, parallel)  # the second step overwrites what the first left behind
    written.clear()
    eager = step(network, parallel)
    assert sorted(written) == sorted(
        2 * ["head", "first.weight", "second.weight", "last.weight"]
    ), "per microbatch"
    # Recomputation gives the backward other tensors of the weights.
    block = network.block
    network.block = partial(checkpoint, block, use_reentrant=False)  # type: ignore[method-assign]
    assert torch.equal(step(network, parallel), eager)
    network.block = block  # type: ignore[method-assign]
    # outside of a step
    with pytest.raises(RuntimeError, match="--no-gradient-accumulation-fusion"):
        network.block(draw("hidden", 2, 5, 8).bfloat16().requires_grad_()).sum().backward()
    # where this torch cannot declare the effect
    monkeypatch.setattr(linear, "CAN_TRACE", False)
    network, parallel, written = compiled()
    assert torch.equal(step(network, parallel), eager)
    assert set(written) == {"head"}, "the loss is outside of graphs"


@pytest.mark.skipif(not linear.CAN_TRACE, reason="graphs write none with torch 2.10")
def test_graphs_write_to_storage_that_a_bucket_borrows_where_it_is_the_only_one_of_the_unit() -> (
    None
):
    rules, results = LayoutRules(bucket_size=10_000, gathers_by_unit=True), []
    for writes in (False, True):
        network, parallel, written = compiled(writes=writes, strategy="optim_grads", rules=rules)
        step(network, parallel)
        results.append(step(network, parallel))
        assert set(written) == (
            {"first.weight", "second.weight", "last.weight"} if writes else set()
        )
    assert torch.equal(*results)


def test_graphs_return_gradients_of_units_with_several_buckets_that_borrow_storage() -> None:
    network, parallel, written = compiled(strategy="optim_grads")
    assert len(parallel.buckets) >= 3 and step(network, parallel).any() and not written
