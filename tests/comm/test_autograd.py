"""Each crossing and its backward are adjoint, collect what they promise, and cost the bytes they name."""

import pytest
import torch

from nanotrain.comm.autograd import concat_along, copy_to, gather_along, reduce_from, scatter_along, split_along
from nanotrain.comm.group import Group
from tests.harness import ranks

ALONG = [gather_along, scatter_along, split_along, concat_along]
DIMS = pytest.mark.parametrize("dim", [0, 1, 2])


def draw(seed: int, shape: tuple[int, ...] = (4, 8, 4)) -> torch.Tensor:
    """Small integers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).float()


def every(group: Group, shape: tuple[int, ...] = (4, 8, 4)) -> list[torch.Tensor]:
    """What each member draws, known to all."""
    return [draw(member, shape) for member in range(group.size)]


def own_of(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return tensor.chunk(group.size, dim)[group.index]


@ranks(4, tp=4)
def test_copy_to_sums_the_gradients_and_reduce_from_the_inputs(ctx):
    group = ctx.group("tp")
    x, total = draw(group.index).requires_grad_(), sum(every(group))
    copied = copy_to(x, group)
    assert torch.equal(copied, x)
    (grad,) = torch.autograd.grad(copied, x, draw(group.index))
    assert torch.equal(grad, total)

    reduced = reduce_from(x, group)
    assert torch.equal(reduced, total)
    (grad,) = torch.autograd.grad(reduced, x, draw(99))
    assert torch.equal(grad, draw(99))


@DIMS
@ranks(4, tp=2)
def test_gather_along_joins_and_its_backward_sums_and_cuts(ctx, dim):
    group = ctx.group("tp")
    x = draw(group.index).requires_grad_()
    gathered = gather_along(x, group, dim=dim)
    assert torch.equal(gathered, torch.cat(every(group), dim))
    shape = tuple(gathered.shape)
    (grad,) = torch.autograd.grad(gathered, x, draw(group.index, shape))
    assert torch.equal(grad, own_of(sum(every(group, shape)), group, dim))


@DIMS
@ranks(4, tp=2)
def test_scatter_along_sums_and_cuts_and_its_backward_joins(ctx, dim):
    group = ctx.group("tp")
    x = draw(group.index).requires_grad_()
    scattered = scatter_along(x, group, dim=dim)
    assert torch.equal(scattered, own_of(sum(every(group)), group, dim))
    shape = tuple(scattered.shape)
    (grad,) = torch.autograd.grad(scattered, x, draw(group.index, shape))
    assert torch.equal(grad, torch.cat(every(group, shape), dim))


@DIMS
@ranks(4, tp=2)
def test_split_along_cuts_what_concat_along_joins_and_backward_too(ctx, dim):
    group = ctx.group("tp")
    x = draw(7).requires_grad_()
    part = split_along(x, group, dim=dim)
    assert torch.equal(part, own_of(x, group, dim))
    whole = concat_along(part, group, dim=dim)
    assert torch.equal(whole, x)
    (grad,) = torch.autograd.grad(whole, x, draw(8))
    assert torch.equal(grad, draw(8))


@ranks(4, tp=4)
def test_every_crossing_takes_tensors_whose_memory_is_out_of_order(ctx):
    group = ctx.group("tp")
    x, dense = draw(group.index).transpose(0, 1), draw(group.index).transpose(0, 1).contiguous()
    for cross in (copy_to, reduce_from):
        assert torch.equal(cross(x, group), cross(dense, group))
    for cross in ALONG:
        assert torch.equal(cross(x, group, dim=1), cross(dense, group, dim=1))


@ranks(4, tp=4)
def test_an_input_and_a_gradient_in_use_elsewhere_stay_as_they_are(ctx):
    group = ctx.group("tp")
    x, upstream = draw(group.index).requires_grad_(), draw(group.index)
    reduce_from(x, group)
    copy_to(x, group).backward(upstream)
    assert torch.equal(x, draw(group.index)) and torch.equal(upstream, draw(group.index))


@ranks(4, tp=4)
def test_cutting_what_does_not_divide_is_refused_before_anything_is_sent(ctx):
    group, x = ctx.group("tp"), torch.zeros(2, 6)
    for cross in (scatter_along, split_along):
        with pytest.raises(AssertionError, match="6 elements of dim 1 cannot be split into 4"):
            cross(x, group, dim=1)
    assert ctx.traffic.bytes() == 0


@ranks(4, tp=4)
def test_one_way_and_back_sends_what_one_all_reduce_sends(ctx):
    group, traffic = ctx.group("tp"), ctx.traffic
    full = draw(0)
    one_all_reduce = 2 * 3 * full.nbytes // 4
    for cross, x in ((copy_to, full), (reduce_from, full)):
        traffic.reset()
        cross(x.clone().requires_grad_(), group).sum().backward()
        assert traffic.bytes("tp") == one_all_reduce
    for cross, x in ((gather_along, own_of(full, group, 1)), (scatter_along, full)):
        traffic.reset()
        cross(x.clone().requires_grad_(), group, dim=1).sum().backward()
        assert traffic.bytes("tp", "all_gather") == traffic.bytes("tp", "reduce_scatter") == one_all_reduce // 2


def test_a_group_of_one_answers_with_its_input_and_leaves_no_trace_in_the_graph():
    alone, x = Group.single_rank("tp"), torch.ones(2, 3, requires_grad=True)
    assert all(cross(x, alone) is x for cross in (copy_to, reduce_from))
    assert all(cross(x, alone, dim=1) is x for cross in ALONG)
