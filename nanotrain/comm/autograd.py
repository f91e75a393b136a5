"""Collectives that autograd can differentiate: one for each way an activation crosses a group.

    function        forward               backward
    copy_to         nothing               all-reduce
    reduce_from     all-reduce            nothing
    gather_along    all-gather            reduce-scatter
    scatter_along   reduce-scatter        all-gather
    split_along     own slice             all-gather
    concat_along    all-gather            own slice

The first four belong where the group's members compute parts of one sum, each with its own weights; the last two
where they all go on to compute the same. A group of one answers with its input and leaves no trace in the graph.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.along import own_slice, start_all_gather, start_all_reduce, start_reduce_scatter
from nanotrain.comm.group import Group

Step = Callable[[Tensor], Tensor]


def copy_to(x: Tensor, group: Group) -> Tensor:
    """The input, which every member has alike; its gradient is the sum of the members' gradients."""
    return _cross(x, group, forward=_same, backward=partial(_sum, group=group))


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """The sum of the members' inputs, for every member; its gradient, alike on all, is each one's gradient."""
    return _cross(x, group, forward=partial(_sum, group=group), backward=_same)


def gather_along(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """The members' inputs joined along `dim`; the gradients of all of it are summed, each member takes its slice."""
    gather, scatter = partial(_gather, group=group, dim=dim), partial(_scatter, group=group, dim=dim)
    return _cross(x, group, forward=gather, backward=scatter)


def scatter_along(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """The own slice along `dim` of the sum of the members' inputs; the slices' gradients are joined."""
    gather, scatter = partial(_gather, group=group, dim=dim), partial(_scatter, group=group, dim=dim)
    return _cross(x, group, forward=scatter, backward=gather)


def split_along(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """The own slice along `dim` of an input that every member has alike; the slices' gradients are joined."""
    gather, split = partial(_gather, group=group, dim=dim), partial(_split, group=group, dim=dim)
    return _cross(x, group, forward=split, backward=gather)


def concat_along(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """The members' inputs joined along `dim`, for every member to use alike; each takes its slice of the gradient."""
    gather, split = partial(_gather, group=group, dim=dim), partial(_split, group=group, dim=dim)
    return _cross(x, group, forward=gather, backward=split)


def _cross(x: Tensor, group: Group, *, forward: Step, backward: Step) -> Tensor:
    return x if group.size == 1 else _crossed(x, forward, backward=backward)


@torch.compiler.disable  # what waits on other ranks stays out of compiled graphs
def _crossed(x: Tensor, forward: Step, *, backward: Step) -> Tensor:
    crossed: Tensor = _Crossing.apply(x, forward, backward)
    return crossed


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Step, backward: Step) -> Tensor:
        ctx.step = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.step(grads[0]), None, None


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: Tensor, group: Group) -> Tensor:
    # A copy: the activation or gradient may be in use elsewhere in the graph.
    return start_all_reduce(tensor.clone(memory_format=torch.contiguous_format), group).wait()


def _gather(tensor: Tensor, group: Group, *, dim: int) -> Tensor:
    return start_all_gather(tensor, group, dim=dim).wait()


def _scatter(tensor: Tensor, group: Group, *, dim: int) -> Tensor:
    return start_reduce_scatter(tensor, group, dim=dim).wait()


def _split(tensor: Tensor, group: Group, *, dim: int) -> Tensor:
    return own_slice(tensor, group, dim=dim).contiguous()
