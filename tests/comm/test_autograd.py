"""Differentiable collectives: forward and backward values, strides, aliasing, bytes."""

import pytest
import torch
from torch import Tensor

from nanotrain.comm.autograd import (
    concat_along,
    copy_to,
    eager,
    eager_or_graph,
    gather_along,
    reduce_from,
    scatter_along,
    split_along,
)
from nanotrain.comm.group import Group
from tests.harness import ranks

ALONG = [gather_along, scatter_along, split_along, concat_along]
DIMS = pytest.mark.parametrize("dim", [0, 1, 2])


def draw(seed: int, shape: tuple[int, ...] = (4, 8, 4)) -> torch.Tensor:
    """Small integers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).float()


def draw_all(group: Group, shape: tuple[int, ...] = (4, 8, 4)) -> list[torch.Tensor]:
    """The tensors that the ranks of a group draw, in group order."""
    return [draw(rank, shape) for rank in range(group.size)]


def slice_of(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return tensor.chunk(group.size, dim)[group.index]


@ranks(4, tp=4, shares=True)
def test_copy_to_sums_the_gradients_and_reduce_from_the_inputs(ctx):
    group = ctx.group("tp")
    x, total = draw(group.index).requires_grad_(), sum(draw_all(group))
    copied = copy_to(x, group)
    assert torch.equal(copied, x)
    (grad,) = torch.autograd.grad(copied, x, draw(group.index))
    assert torch.equal(grad, total)

    reduced = reduce_from(x, group)
    assert torch.equal(reduced, total)
    (grad,) = torch.autograd.grad(reduced, x, draw(99))
    assert torch.equal(grad, draw(99))


@DIMS
@ranks(4, tp=2, shares=True)
def test_gather_along_gathers_and_its_backward_reduce_scatters(ctx, dim):
    group = ctx.group("tp")
    x = draw(group.index).requires_grad_()
    gathered = gather_along(x, group, dim=dim)
    assert torch.equal(gathered, torch.cat(draw_all(group), dim))
    shape = tuple(gathered.shape)
    (grad,) = torch.autograd.grad(gathered, x, draw(group.index, shape))
    assert torch.equal(grad, slice_of(sum(draw_all(group, shape)), group, dim))


@DIMS
@ranks(4, tp=2, shares=True)
def test_scatter_along_reduce_scatters_and_its_backward_gathers(ctx, dim):
    group = ctx.group("tp")
    x = draw(group.index).requires_grad_()
    scattered = scatter_along(x, group, dim=dim)
    assert torch.equal(scattered, slice_of(sum(draw_all(group)), group, dim))
    shape = tuple(scattered.shape)
    (grad,) = torch.autograd.grad(scattered, x, draw(group.index, shape))
    assert torch.equal(grad, torch.cat(draw_all(group, shape), dim))


@DIMS
@ranks(4, tp=2, shares=True)
def test_concat_along_is_the_inverse_of_split_along_and_so_are_the_backwards(ctx, dim):
    group = ctx.group("tp")
    x = draw(7).requires_grad_()
    part = split_along(x, group, dim=dim)
    assert torch.equal(part, slice_of(x, group, dim))
    full = concat_along(part, group, dim=dim)
    assert torch.equal(full, x)
    (grad,) = torch.autograd.grad(full, x, draw(8))
    assert torch.equal(grad, draw(8))


@ranks(4, tp=4, shares=True)
def test_tensors_may_have_any_strides(ctx):
    group = ctx.group("tp")
    x, dense = draw(group.index).transpose(0, 1), draw(group.index).transpose(0, 1).contiguous()
    for function in (copy_to, reduce_from):
        assert torch.equal(function(x, group), function(dense, group)), function.__name__
    for function in ALONG:
        assert torch.equal(function(x, group, dim=1), function(dense, group, dim=1)), (
            function.__name__
        )


@ranks(4, tp=4, shares=True)
def test_inputs_and_gradients_are_not_overwritten(ctx):
    group = ctx.group("tp")
    x, upstream = draw(group.index).requires_grad_(), draw(group.index)
    reduce_from(x, group)
    copy_to(x, group).backward(upstream)
    assert torch.equal(x, draw(group.index)) and torch.equal(upstream, draw(group.index))


@ranks(4, tp=4, shares=True)
def test_a_size_that_does_not_divide_raises_before_anything_is_sent(ctx):
    group, x = ctx.group("tp"), torch.zeros(2, 6)
    for function in (scatter_along, split_along):
        with pytest.raises(AssertionError, match="6 elements of dim 1 cannot be split into 4"):
            function(x, group, dim=1)
    assert ctx.traffic.bytes() == 0


@ranks(4, tp=4, shares=True)
def test_forward_and_backward_send_the_bytes_of_one_all_reduce(ctx):
    group, traffic = ctx.group("tp"), ctx.traffic
    full = draw(0)
    one_all_reduce = 2 * 3 * full.nbytes // 4
    for function, x in ((copy_to, full), (reduce_from, full)):
        traffic.reset()
        function(x.clone().requires_grad_(), group).sum().backward()
        assert traffic.bytes("tp") == one_all_reduce, function.__name__
    for function, x in ((gather_along, slice_of(full, group, 1)), (scatter_along, full)):
        traffic.reset()
        function(x.clone().requires_grad_(), group, dim=1).sum().backward()
        assert (
            traffic.bytes("tp", "all_gather")
            == traffic.bytes("tp", "reduce_scatter")
            == one_all_reduce // 2
        )


def test_in_a_group_of_one_the_output_is_the_input_without_a_graph_node():
    single, x = Group.single_rank("tp"), torch.ones(2, 3, requires_grad=True)
    assert all(function(x, single) is x for function in (copy_to, reduce_from))
    assert all(function(x, single, dim=1) is x for function in ALONG)


def test_a_graph_has_the_form_that_is_meant_for_it() -> None:
    # half a second, which no rank above should pay
    from torch._dynamo.testing import CompileCounterWithBackend

    function, x = eager_or_graph(lambda x: x + 1, lambda x: x + 2), torch.zeros(3)
    compiled = torch.compile(function, backend=CompileCounterWithBackend("eager"), fullgraph=True)
    assert (function(x).tolist(), compiled(x).tolist()) == ([1.0] * 3, [2.0] * 3)


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
    # half a second, which no rank above should pay
    from torch._dynamo.testing import CompileCounterWithBackend

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
