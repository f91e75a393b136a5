"""Offloaded blocks have the same gradients, and nothing of theirs stays on the device between
forward and backward.
"""

import pytest
import torch
from torch import Tensor, nn

from nanotrain.comm.device import HostTransfer
from nanotrain.memory import offload
from nanotrain.memory.offload import offloaded

N = 40


class Block(nn.Module):
    """Saves its input twice (once as a view), an inner tensor, a parameter and a shared tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, N, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return (x @ self.weight).sin() * table + x.t() @ self.weight


class NotedTransfer(HostTransfer):
    """Notes copies, in order."""

    calls: list[str] = []

    def to_host(self, tensor: Tensor) -> Tensor:
        self.calls.append("to host")
        return super().to_host(tensor)

    def start_return(self, host: Tensor):
        self.calls.append("return")
        return super().start_return(host)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(offload, "HostTransfer", NotedTransfer)
    monkeypatch.setattr(NotedTransfer, "calls", [])
    return NotedTransfer.calls


def gradients(functions, blocks: list[Block]) -> list[Tensor]:
    hidden = inputs = torch.randn(N, N, generator=torch.Generator().manual_seed(9)).requires_grad_()
    table = torch.full((N, N), 0.5)
    for function in functions:
        hidden = function(hidden, table)
    return [
        hidden.detach(),
        *torch.autograd.grad(hidden.square().sum(), [inputs, *(b.weight for b in blocks)]),
    ]


def test_values_and_gradients_are_the_same_and_each_storage_is_copied_once(calls):
    blocks = [Block(seed) for seed in range(3)]
    expected = gradients(blocks, blocks)
    actual = gradients([*offloaded(blocks[:2]), blocks[2]], blocks)
    assert all(
        torch.equal(value, reference) for value, reference in zip(expected, actual, strict=True)
    )
    # Per block its input and the product; not the parameter and the table. The one of block 0
    # returns beside block 1's.
    assert calls == ["to host"] * 4 + ["return"] * 4


def test_microbatches_in_flight_do_not_mix(calls):
    blocks = [Block(seed) for seed in range(2)]
    functions, table = offloaded(blocks), torch.ones(N, N)
    inputs = [torch.randn(N, N).requires_grad_() for _ in range(3)]
    outputs = [functions[1](functions[0](x, table), table) for x in inputs]
    for x, out in zip(inputs, outputs, strict=True):
        (grad,) = torch.autograd.grad(out.sum(), [x])
        (expected,) = torch.autograd.grad(blocks[1](blocks[0](x, table), table).sum(), [x])
        assert torch.equal(grad, expected)


def test_without_gradients_nothing_is_copied(calls):
    blocks = [Block(0)]
    with torch.no_grad():
        offloaded(blocks)[0](torch.ones(N, N), torch.ones(N, N))
    assert not calls
