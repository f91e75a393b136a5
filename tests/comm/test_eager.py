"""`eager` ends a graph, compiles nothing twice, and costs nothing where nothing is compiled."""

import subprocess
import sys
from pathlib import Path

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


def test_a_run_without_compile_does_not_import_the_compiler(tmp_path: Path) -> None:
    line = ["+config=tiny", "--mock-data", "--vocab-size=256", "--num-workers=0", "--train-iters=1", "--num-layers=1"]
    line += [f"--run-dir={tmp_path}", "--eval-interval=0", "--generate-tokens=0"]
    code = f"""import sys; from nanotrain.train.__main__ import main
assert main({line}) == 0, "the run failed"
sys.exit(sum(name in sys.modules for name in ("torch._dynamo", "torch._inductor", "matplotlib", "wandb")))"""
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0
