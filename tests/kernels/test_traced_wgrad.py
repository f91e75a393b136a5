"""Compiled graphs write weight gradients to the gradient buffer, to the bit as autograd returns them."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanotrain.kernels import traced_wgrad
from nanotrain.parallel.dp.data_parallel import DataParallel
from tests.kernels.writing_network import Network, draw, step, wrap


def compiled(*, strategy: str = "optim") -> tuple[Network, DataParallel, list[str]]:
    """A network with a compiled block, and the weights that graphs write."""
    torch._dynamo.reset()
    network, written = Network(), []
    parallel = wrap(network, writes=True, dtype=torch.bfloat16, strategy=strategy)
    network.block = torch.compile(network.short_block, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
    start = parallel._start_write

    def record(name: str) -> tuple[Tensor, bool] | None:
        written.append(name)
        return start(name)

    for name, param in network.named_parameters():
        view = getattr(param, "grad_view", None)
        if view is not None:
            object.__setattr__(view, "start_write", partial(record, name))  # the same object is found from the storage
    return network, parallel, written


def test_graphs_write_to_the_bit_what_autograd_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    network, parallel, written = compiled()
    step(network, parallel)  # the second step overwrites what the first left behind
    written.clear()
    found = step(network, parallel)
    assert sorted(written) == sorted(2 * ["head", "first.weight", "second.weight", "last.weight"]), "per microbatch"
    # Recomputation gives the backward other tensors of the weights.
    block = network.block
    network.block = partial(checkpoint, block, use_reentrant=False)  # type: ignore[method-assign]
    assert torch.equal(step(network, parallel), found)
    network.block = block  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="--no-gradient-accumulation-fusion"):  # outside of a step
        network.block(draw("hidden", 2, 5, 8).bfloat16().requires_grad_()).sum().backward()
    # where this torch cannot declare the effect
    monkeypatch.setattr(traced_wgrad, "CAN_TRACE", False)
    network, parallel, written = compiled()
    assert torch.equal(step(network, parallel), found)
    assert set(written) == {"head"}, "the loss is outside of graphs"


def test_graphs_do_not_write_to_storage_that_a_bucket_borrows() -> None:
    network, parallel, written = compiled(strategy="optim_grads")
    assert step(network, parallel).any() and not written
