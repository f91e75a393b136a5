"""`eager` ends a graph, compiles nothing twice, and costs nothing where nothing is compiled."""

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from nanotrain.comm.eager import eager


class _Double(torch.autograd.Function):
    """Doubles; fails where it is traced."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        assert not torch.compiler.is_compiling()
        return 2 * x

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        assert not torch.compiler.is_compiling()
        return 2 * grads[0]


@eager
def double(x: Tensor) -> Tensor:
    out: Tensor = _Double.apply(x)
    return out


def test_runs_between_two_graphs_without_compiling_again() -> None:
    def function(x: Tensor) -> Tensor:
        return double(x.relu()).sigmoid()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter)
    for _ in range(12):
        x, y = (torch.linspace(-1, 1, 6, requires_grad=True) for _ in range(2))
        compiled(x).sum().backward()
        function(y).sum().backward()
        assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
    assert counter.frame_count == 2, "one graph before the call and one after it"
