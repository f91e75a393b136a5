"""Differentiable collectives, as Megatron-LM's `mappings.py`.

    function        forward           backward
    copy_to         identity          all-reduce
    reduce_from     all-reduce        identity
    gather_along    all-gather        reduce-scatter
    scatter_along   reduce-scatter    all-gather
    split_along     local slice       all-gather
    concat_along    all-gather        local slice

The first four are for regions in which each rank computes a partial sum with its own weights. The
last two are for regions in which all ranks compute the same values. In a group of one rank the
output is the input, without a graph node. In compiled code each collective is one operator of the
graph, which finds its group by the group's handle.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from nanotrain.comm.collectives import (
    local_slice,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from nanotrain.comm.group import Group

F = TypeVar("F", bound=Callable[..., Any])


def eager_or_graph(eager_form: F, graph_form: Callable[..., Any], *, is_traced: bool = True) -> F:
    """A function with an eager form, and a form that torch.compile traces.

    The compiler is asked per call, not per module: parts of a compiled block run eagerly (experts,
    recomputed functions, functions left out of a graph).
    """

    @functools.wraps(eager_form)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return graph_form(*args, **kwargs)
        return eager_form(*args, **kwargs)

    call.is_traced = is_traced  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def eager(function: F) -> F:
    """Run a function eagerly inside compiled code: a graph ends before it, another one follows.

    `torch.compiler.disable` is called only while a graph is compiled: it imports torch._dynamo,
    1.3 to 5 s of CPU time.
    """

    def end_graph(*args: Any, **kwargs: Any) -> Any:
        return torch.compiler.disable(function)(*args, **kwargs)

    return eager_or_graph(function, end_graph, is_traced=False)


TensorFunction = Callable[..., Tensor]


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Return the input, which is equal on all ranks; the backward sums the ranks' gradients."""
    return _apply(x, group, forward=_identity, backward=_all_reduce)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Sum the ranks' inputs; the backward returns the gradient, which is equal on all ranks."""
    return _apply(x, group, forward=_all_reduce, backward=_identity)


def gather_along(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """Concatenate the ranks' inputs along `dim`; the backward reduce-scatters the gradients."""
    return _apply(x, group, dim=dim, forward=_all_gather, backward=_reduce_scatter)


def scatter_along(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """Reduce-scatter the ranks' inputs along `dim`; the backward all-gathers the gradients."""
    return _apply(x, group, dim=dim, forward=_reduce_scatter, backward=_all_gather)


def split_along(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """This rank's slice along `dim` of a replicated input; the backward all-gathers."""
    return _apply(x, group, dim=dim, forward=_local_slice, backward=_all_gather)


def concat_along(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """All-gather inputs along `dim`; the backward returns this rank's slice of the gradient."""
    return _apply(x, group, dim=dim, forward=_all_gather, backward=_local_slice)


def _apply(
    x: Tensor, group: Group, *, dim: int = 0, forward: TensorFunction, backward: TensorFunction
) -> Tensor:
    """Run a collective with autograd; x itself in a group of one rank."""
    if group.size == 1:
        return x
    along = {"group": group, "dim": dim}
    out: Tensor = _Collective.apply(x, partial(forward, **along), partial(backward, **along))
    return out


class _Collective(torch.autograd.Function):
    """A collective whose backward is another collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: TensorFunction, backward: TensorFunction) -> Tensor:
        """Run the collective, and keep the one of the backward."""
        ctx.backward_function = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_function(grads[0]), None, None


def _identity(tensor: Tensor, group: Group, *, dim: int) -> Tensor:
    return tensor.view_as(tensor)


def _local_slice(tensor: Tensor, group: Group, *, dim: int) -> Tensor:
    return local_slice(tensor, group, dim=dim).contiguous()


def _run(tensor: Tensor, group: Group, *, op: str, dim: int) -> Tensor:
    """A collective without autograd, complete on return."""
    if op == "all_reduce":
        # reduce a copy: the activation or gradient may be in use elsewhere in the graph
        return start_all_reduce(tensor.clone(memory_format=torch.contiguous_format), group).wait()
    start = start_all_gather if op == "all_gather" else start_reduce_scatter
    return start(tensor, group, dim=dim).wait()


def _run_in_graph(tensor: Tensor, group: Group, *, op: str, dim: int) -> Tensor:
    return collective_in_graph(tensor, group.handle, op=op, dim=dim, size=group.size)


# an all-reduce, all-gather or reduce-scatter without autograd; in a graph it is one operator
collective = eager_or_graph(_run, _run_in_graph)
_all_reduce = partial(collective, op="all_reduce")
_all_gather = partial(collective, op="all_gather")
_reduce_scatter = partial(collective, op="reduce_scatter")


@torch.library.custom_op("nanotrain::collective", mutates_args=())
def collective_in_graph(tensor: Tensor, handle: Tensor, *, op: str, dim: int, size: int) -> Tensor:
    """A collective of the group with this handle, as an operator of a compiled graph."""
    return _run(tensor, Group.from_handle(handle), op=op, dim=dim).contiguous()


@collective_in_graph.register_fake
def _(tensor: Tensor, handle: Tensor, *, op: str, dim: int, size: int) -> Tensor:
    shape = list(tensor.shape)
    if op == "all_gather":
        shape[dim] *= size
    elif op == "reduce_scatter":
        shape[dim] //= size
    return tensor.new_empty(shape)
