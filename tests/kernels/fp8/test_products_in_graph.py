"""fp8 products inside of one compiled graph have the bits of those outside of graphs."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.kernels import linear
from nanotrain.kernels.fp8.layer import Fp8Layer, Fp8Options
from nanotrain.kernels.fp8.norm import NormCast, norm_linears
from nanotrain.kernels.fp8.products import keep_weights
from nanotrain.kernels.fp8.swiglu import swiglu_linear
from nanotrain.kernels.linear import GradView, attach
from nanotrain.model.norm import RMSNorm
from nanotrain.parallel.tp.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    column_parallel,
)
from tests.kernels.fp8.test_products import draw, options

H, INNER, STEPS = 32, 48, 2
EPS = 1e-5


class Block(nn.Module):
    """A gated MLP in fp8 with one bias."""

    def __init__(self, fp8: Fp8Options, *, joins_swiglu: bool, norm: str) -> None:
        super().__init__()
        self.norm = norm
        self.norm_weight = nn.Parameter(1 + draw(H, seed=7).bfloat16() / 4)
        self.joins_swiglu = joins_swiglu
        parallel = replace(TensorParallel.single_rank(), fp8=fp8)
        weights = [
            nn.Parameter(draw(*shape, seed=seed).bfloat16())
            for seed, shape in enumerate(3 * [(INNER, H)])
        ]
        bias = nn.Parameter(draw(INNER, seed=5).bfloat16())
        self.gate = ColumnParallelLinear(weights[0], bias, tensor_parallel=parallel)
        self.up = ColumnParallelLinear(weights[1], None, tensor_parallel=parallel)
        down = nn.Parameter(weights[2].detach().t().contiguous())
        self.down = RowParallelLinear(down, None, tensor_parallel=parallel)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self._project(x)
        if self.joins_swiglu:
            return x + swiglu_linear(gate, up, linear=self.down)
        return x + self.down(F.silu(gate) * up)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """With a norm before them, by itself or in the casts."""
        layers = (self.gate, self.up)
        if self.norm in ("kept", "cast again"):
            how = NormCast(EPS, keeps=self.norm == "kept")
            return norm_linears(x, self.norm_weight, how=how, linears=layers)
        if self.norm == "separate":
            x = RMSNorm(self.norm_weight, eps=EPS)(x)
        return column_parallel(x, layers)


def trained(
    fp8: Fp8Options,
    *,
    is_compiled: bool,
    writes: bool,
    joins_swiglu: bool = False,
    norm: str = "",
) -> list[Tensor]:
    """Outputs, gradients and histories of two steps of two microbatches through two blocks."""
    torch._dynamo.reset()
    blocks, found = [Block(fp8, joins_swiglu=joins_swiglu, norm=norm) for _ in range(2)], []
    buffers = {
        param: torch.zeros(param.shape)
        for block in blocks
        for param in block.parameters()
        if param.dim() == 2
    }
    num_written = dict.fromkeys(buffers, 0)
    for block in blocks:
        keep_weights(block)
        if is_compiled:
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]

    def start_write(param: Tensor) -> tuple[Tensor, bool]:
        num_written[param] += 1
        return buffers[param], num_written[param] > 1

    if writes:
        for param in buffers:
            start = partial(start_write, param)
            attach(GradView(torch.float32, start, lambda: None, start_write_in_graph=start), param)
    layers = [
        module for block in blocks for module in block.modules() if isinstance(module, Fp8Layer)
    ]
    for step in range(STEPS):
        for microbatch in range(2):
            x = draw(2, 8, H, seed=10 * step + microbatch).bfloat16().requires_grad_()
            out = blocks[1](blocks[0](x))
            out.backward(draw(*out.shape, seed=100 + microbatch).bfloat16())
            assert x.grad is not None
            found += [out.detach(), x.grad]
            assert all((layer.kept is not None) == fp8.keeps_weights for layer in layers)
        for layer in layers:
            layer.kept = None
            if layer.step_amax is not None:
                found.append(layer.step_amax.clone())
                layer.update(layer.step_amax.clone())
    grads = [
        param.grad for block in blocks for param in block.parameters() if param.grad is not None
    ]
    num_norms = 2 if norm else 0
    assert len(grads) == num_norms + (2 if writes else 8), "a graph returns what it does not write"
    return [*found, *grads, *buffers.values()]


CASES = [
    ("delayed", {}),
    ("delayed", {"keeps_weights": True}),
    ("rowwise", {"wgrad": False}),
    ("blockwise", {"keeps_weights": True}),
]


@pytest.mark.parametrize(("recipe", "more"), CASES, ids=str)
def test_a_graph_has_the_bits_of_the_products_outside(recipe: str, more: dict[str, bool]) -> None:
    torch._dynamo.utils.counters.clear()
    both = [
        trained(options(recipe, **more), is_compiled=flag, writes=linear.CAN_TRACE)
        for flag in (False, True)
    ]
    assert all(torch.equal(eager, graph) for eager, graph in zip(*both, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "blocks share it"


def test_a_graph_computes_swiglu_in_its_casts_with_the_same_bits() -> None:
    """Beside the activation and the product one after the other, in a graph and outside."""
    results = [
        trained(options("blockwise"), is_compiled=flag, writes=linear.CAN_TRACE, joins_swiglu=joins)
        for flag, joins in ((False, False), (False, True), (True, True))
    ]
    for separate, joined, in_graph in zip(*results, strict=True):
        assert torch.equal(separate, joined) and torch.equal(joined, in_graph)


@pytest.mark.parametrize("norm", ["kept", "cast again"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8"])
def test_casts_compute_a_norm_with_the_bits_of_both_after_each_other(
    recipe: str, norm: str
) -> None:
    found, expected = (
        trained(options(recipe), is_compiled=False, writes=True, norm=each)
        for each in (norm, "separate")
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_graph_computes_a_norm_in_its_casts() -> None:
    """Within the order of its sums, which may round a value to the other of two fp8 numbers."""
    found, expected = (
        trained(options("blockwise"), is_compiled=flag, writes=linear.CAN_TRACE, norm="kept")
        for flag in (True, False)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
