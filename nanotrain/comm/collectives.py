"""Collectives over a `Group`: started, and finished by `Pending.wait()`.

    pending.py                  what every `start_` returns, and how a failure is told
    start_all_reduce            in place
    start_reduce_scatter        native on NCCL, gloo.py on gloo
    start_all_gather            likewise; the own slice of the output may be the input
    all_reduce ... broadcast    the same, finished on return
    all_reduce_scalars          several host numbers in one collective
    all_gather_object, barrier     control traffic

A group of one answers with its input and touches no process group. Bytes sent are booked in the group's ledger.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.comm import gloo
from nanotrain.comm.device import home_of
from nanotrain.comm.group import Group
from nanotrain.comm.traffic import reduced_bytes
from nanotrain.comm.work import DONE, Work, watch

__all__ = [
    "DONE",
    "Work",
    "all_gather_into",
    "all_gather_object",
    "all_reduce",
    "all_reduce_scalars",
    "barrier",
    "broadcast",
    "reduce_scatter_into",
    "start_all_gather_into",
    "start_all_reduce",
    "start_reduce_scatter_into",
]

# torch 2.13 renamed both and warns on the old names; 2.10 knows only the old ones.
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def start_all_reduce(tensor: Tensor, group: Group, *, op: str = "sum") -> Work:
    """Begin to combine `tensor` elementwise over the group, in place.

    Args:
        tensor: any shape, contiguous; every rank's result is bit-equal.
        group: who takes part.
        op: "sum", "max" or "min".

    Returns:
        what to wait on before the tensor is read or written.
    """
    if group.size == 1:
        return DONE
    group.traffic.record(group.name, "all_reduce", num_bytes=2 * reduced_bytes(tensor.nbytes, group.size))
    with watch("all_reduce", group):
        work = dist.all_reduce(tensor, op=_OPS[op], group=group.process_group, async_op=True)
    return Work("all_reduce", group, works=[work])


def start_reduce_scatter_into(output: Tensor, tensor: Tensor, *, group: Group) -> Work:
    """Begin to sum `tensor` over the group; member i receives the i-th of `size` equal slices.

    Args:
        output: [n / size], contiguous; may be the own slice of `tensor`.
        tensor: [n], contiguous, the same dtype; must not change before `wait`.
        group: who takes part.

    Returns:
        what to wait on before `output` is read. On gloo the sum itself is done in `wait`.
    """
    _check_slices(tensor, output, size=group.size)
    if group.size == 1:
        _answer(output, tensor)
        return DONE
    group.traffic.record(group.name, "reduce_scatter", num_bytes=reduced_bytes(tensor.nbytes, group.size))
    with watch("reduce_scatter", group):
        if dist.get_backend(group.process_group) == "gloo":
            return gloo.start_reduce_scatter_into(output, tensor, group=group)
        work = _reduce_scatter_flat(output, tensor, group=group.process_group, async_op=True)
    return Work("reduce_scatter", group, works=[work])


def start_all_gather_into(output: Tensor, tensor: Tensor, *, group: Group) -> Work:
    """Begin to collect every member's `tensor` in `output`, in the order of the group.

    Args:
        output: [n], contiguous.
        tensor: [n / size], contiguous; may be the own slice of `output`.
        group: who takes part.

    Returns:
        what to wait on before `output` is read.
    """
    _check_slices(output, tensor, size=group.size)
    if group.size == 1:
        _answer(output, tensor)
        return DONE
    group.traffic.record(group.name, "all_gather", num_bytes=reduced_bytes(output.nbytes, group.size))
    with watch("all_gather", group):
        if dist.get_backend(group.process_group) == "gloo":
            return gloo.start_all_gather_into(output, tensor, group=group)
        work = _all_gather_flat(output, tensor, group=group.process_group, async_op=True)
    return Work("all_gather", group, works=[work])


def all_reduce(tensor: Tensor, group: Group, *, op: str = "sum") -> None:
    """`start_all_reduce`, finished on return."""
    start_all_reduce(tensor, group, op=op).wait()


def reduce_scatter_into(output: Tensor, tensor: Tensor, *, group: Group) -> None:
    """`start_reduce_scatter`, finished on return."""
    start_reduce_scatter_into(output, tensor, group=group).wait()


def all_gather_into(output: Tensor, tensor: Tensor, *, group: Group) -> None:
    """`start_all_gather`, finished on return."""
    start_all_gather_into(output, tensor, group=group).wait()


def broadcast(tensor: Tensor, group: Group, *, source: int = 0) -> None:
    """Overwrite `tensor` with that of the group's member number `source` (an index, not a global rank)."""
    if group.size == 1:
        return
    group.traffic.record(group.name, "broadcast", num_bytes=reduced_bytes(tensor.nbytes, group.size))
    with watch("broadcast", group):
        work = dist.broadcast(tensor, src=group.ranks[source], group=group.process_group, async_op=True)
    Work("broadcast", group, works=[work]).wait()


def all_reduce_scalars(values: Sequence[float], group: Group, *, op: str = "sum") -> list[float]:
    """Combine host numbers over the group, all of them in one float64 collective (booked as "numbers").

    One element costs as much as a thousand (0.3 to 1.5 ms on gloo), so callers bring all they have at once.
    """
    if group.size == 1:
        return [float(value) for value in values]
    packed = torch.tensor(values, dtype=torch.float64, device=home_of(group.process_group))
    group.traffic.record(group.name, "numbers", num_bytes=2 * reduced_bytes(packed.nbytes, group.size))
    with watch("all_reduce_scalars", group):
        work = dist.all_reduce(packed, op=_OPS[op], group=group.process_group, async_op=True)
    Work("all_reduce_scalars", group, works=[work]).wait()
    return packed.tolist()


def all_gather_object(obj: Any, group: Group) -> list[Any]:
    """Every member's picklable object, in the order of the group."""
    if group.size == 1:
        return [obj]
    gathered: list[Any] = [None] * group.size
    with watch("all_gather_object", group):
        dist.all_gather_object(gathered, obj, group=group.process_group)
    return gathered


def barrier(group: Group) -> None:
    """Return once every member has come here; the host waits, on CUDA too."""
    # Not dist.barrier: on NCCL it picks a device by guesswork and does not stop the host.
    all_reduce_scalars([0.0], group)


def _check_slices(full: Tensor, part: Tensor, *, size: int) -> None:
    assert part.numel() * size == full.numel(), "unequal slices would reach the wrong rank"
    assert part.dtype == full.dtype, f"{part.dtype} and {full.dtype}: bytes would be taken for other numbers"
    assert part.is_contiguous() and full.is_contiguous(), "slices are cut from memory, not from strides"


def _answer(output: Tensor, tensor: Tensor) -> None:
    """A group of one: the output is the input, copied unless they are the same memory."""
    if output.data_ptr() != tensor.data_ptr() or output.is_meta:
        output.copy_(tensor.view_as(output))
