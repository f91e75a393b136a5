"""Collectives along any dim of a tensor, started; and the tensors they will bring.

Collectives cut memory into equal consecutive slices, so a dim other than the first is moved to the front and back:

    start_gather    [.., n, ..] of every member -> [.., size * n, ..]
    start_scatter   [.., size * n, ..], summed over the group -> the own [.., n, ..]
    start_sum       the sum over the group, in place
    own_slice       [.., size * n, ..] -> the own [.., n, ..], no communication

A group of one answers with its input.
"""

from collections.abc import Callable

from torch import Tensor

from nanotrain.comm.collectives import DONE, Work, start_all_gather_into, start_reduce_scatter_into
from nanotrain.comm.collectives import start_all_reduce as start_all_reduce_in_place
from nanotrain.comm.group import Group


class Coming:
    """A tensor on its way.

    Args:
        pending: the collective that brings it.
        take: makes the tensor once the collective is through.
    """

    def __init__(self, pending: Work, take: Callable[[], Tensor]) -> None:
        self._pending, self._take = pending, take

    def wait(self) -> Tensor:
        """The tensor, once it may be used on the current stream."""
        self._pending.wait()
        return self._take()


def start_all_gather(tensor: Tensor, group: Group, *, dim: int) -> Coming:
    """Begin to put every member's tensor one after another along `dim`, in the order of the group.

    Args:
        tensor: any shape, the same on every member; must not change before `wait`.
        group: who takes part.
        dim: along which the parts are joined.
    """
    if group.size == 1:
        return Coming(DONE, lambda: tensor)
    parts = tensor.new_empty((group.size, *tensor.shape))
    pending = start_all_gather_into(parts, tensor.contiguous(), group=group)
    return Coming(pending, lambda: parts.movedim(0, dim).flatten(dim, dim + 1))


def start_reduce_scatter(tensor: Tensor, group: Group, *, dim: int) -> Coming:
    """Begin to sum over the group and to keep the own one of `size` equal slices along `dim`.

    Args:
        tensor: its size along `dim` is a multiple of the group's; must not change before `wait`.
        group: who takes part.
        dim: along which the sum is cut.
    """
    if group.size == 1:
        return Coming(DONE, lambda: tensor)
    _check_divides(tensor, group, dim=dim)
    slices = tensor.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    own = slices.new_empty(slices.shape[1:])
    return Coming(start_reduce_scatter_into(own, slices, group=group), lambda: own)


def start_all_reduce(tensor: Tensor, group: Group) -> Coming:
    """Begin to sum a contiguous tensor over the group, in place."""
    return Coming(start_all_reduce_in_place(tensor, group), lambda: tensor)


def own_slice(tensor: Tensor, group: Group, *, dim: int) -> Tensor:
    """The member's own of `size` equal slices along `dim`, a view."""
    _check_divides(tensor, group, dim=dim)
    length = tensor.shape[dim] // group.size
    return tensor.narrow(dim, group.index * length, length)


def _check_divides(tensor: Tensor, group: Group, *, dim: int) -> None:
    size = tensor.shape[dim]
    assert size % group.size == 0, f"{size} elements of dim {dim} cannot be cut into {group.size} equal slices"
