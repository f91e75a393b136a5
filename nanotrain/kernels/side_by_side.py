"""Tensors side by side: slices [..., O] of the last dim of one contiguous tensor [..., P].

    join_sides      the one tensor, without a copy where the tensors are its slices in this order
    order_of_sides  in which order tensors are the slices
    empty_sides     new tensors that lie in such an order

Outputs of one product are side by side. A backward that writes the gradients of such outputs side by side too saves
the copy that joins them (`joined.py`).

    O outputs of a layer   P outputs of all layers together
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor


def join_sides(parts: Sequence[Tensor]) -> Tensor:
    """[..., O] tensors -> [..., P]: a view where they are its slices in this order, else a copy."""
    if not _are_in_order(parts):
        return torch.cat([*parts], -1)
    first = parts[0]
    return first.as_strided((*first.shape[:-1], sum(part.shape[-1] for part in parts)), first.stride())


def order_of_sides(parts: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The order in which [..., O] tensors are the slices of one; None where they are not."""
    order = tuple(sorted(range(len(parts)), key=lambda i: parts[i].storage_offset()))
    return order if _are_in_order([parts[i] for i in order]) else None


def empty_sides(sizes: Sequence[int], order: tuple[int, ...] | None, *, like: Tensor) -> list[Tensor]:
    """Uninitialized tensors [..., O].

    Args:
        sizes: O of each.
        order: in which they are slices of one tensor; None: each has memory of its own.
        like: [..., any], of the dtype and on the device of the result.
    """
    shape = like.shape[:-1]
    if order is None:
        return [like.new_empty((*shape, size)) for size in sizes]
    parts = like.new_empty((*shape, sum(sizes))).split([sizes[i] for i in order], -1)
    return [parts[order.index(i)] for i in range(len(sizes))]


def _are_in_order(parts: Sequence[Tensor]) -> bool:
    """Whether they are the slices of one contiguous tensor, in this order."""
    first = parts[0]
    shape = (*first.shape[:-1], sum(part.shape[-1] for part in parts))
    strides = (*accumulate(reversed(shape[1:]), mul, initial=1),)[::-1]
    starts = accumulate((part.shape[-1] for part in parts), initial=first.storage_offset())
    return all(
        part.untyped_storage()._cdata == first.untyped_storage()._cdata
        and part.storage_offset() == start
        and part.stride() == strides
        and part.shape[:-1] == first.shape[:-1]
        and part.dtype is first.dtype
        for part, start in zip(parts, starts, strict=False)
    )
