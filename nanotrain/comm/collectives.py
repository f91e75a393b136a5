"""Collectives over a `Group`. The `start_` forms return a `Work` whose result is the output tensor.

    start_all_reduce                                    in place
    start_reduce_scatter_into, start_all_gather_into    flat memory into a given output
    start_reduce_scatter, start_all_gather              along any dim, into a new tensor
    local_slice                                         the slice that a reduce-scatter returns
    start_all_reduce_scalars                            host numbers
    all_reduce, all_gather_into, all_reduce_scalars,    complete on return
    all_reduce_coalesced
    all_gather_object, gather_object,                   control traffic
    broadcast_object, barrier

Objects are sent along the tree of a group if it has one (`Group.levels`). In a group of one rank
the output is the input and no process group is used. `group.traffic` counts the bytes sent.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.comm import gloo
from nanotrain.comm.device import HostCopy, process_group_device, to_device
from nanotrain.comm.group import Group, reduced_bytes
from nanotrain.comm.work import Work, translate_errors, waiting

# torch 2.13 renamed both and warns on the old names; 2.10 has only the old ones.
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def start_all_reduce(tensor: Tensor, group: Group, *, op: str = "sum") -> Work[Tensor]:
    """Start to reduce `tensor` elementwise over the group, in place.

    Args:
        tensor: any shape, contiguous; the result is bit-equal on every rank.
        op: "sum", "avg" (the sum divided by the number of ranks), "max" or "min".
    """
    if group.size == 1:
        return Work.completed(tensor)
    group.record("all_reduce", num_bytes=2 * reduced_bytes(tensor.nbytes, group.size))
    with translate_errors("all_reduce", group):
        handle = dist.all_reduce(tensor, op=_OPS[op], group=group.process_group, async_op=True)
    return Work(lambda: tensor, op="all_reduce", group=group, handles=[handle], keep=[tensor])


def start_reduce_scatter_into(
    output: Tensor, tensor: Tensor, *, group: Group, op: str = "sum"
) -> Work[Tensor]:
    """Start a reduce-scatter of `tensor` in `size` equal slices, slice i to rank i of the group.

    Args:
        output: [n / size], contiguous; may be this rank's slice of `tensor`.
        tensor: [n], contiguous, the same dtype; must not change before `wait`. On gloo `wait`
            computes the sum.
        op: "sum" or "avg".
    """
    if _is_local(output, tensor, full=tensor, group=group):
        return Work.completed(output)
    group.record("reduce_scatter", num_bytes=reduced_bytes(tensor.nbytes, group.size))
    with translate_errors("reduce_scatter", group):
        if group.is_gloo:
            return gloo.start_reduce_scatter_into(output, tensor, group=group, averages=op == "avg")
        handle = _reduce_scatter_flat(
            output.view(-1), tensor.view(-1), op=_OPS[op], group=group.process_group, async_op=True
        )
    return Work(
        lambda: output, op="reduce_scatter", group=group, handles=[handle], keep=[output, tensor]
    )


def start_all_gather_into(output: Tensor, tensor: Tensor, *, group: Group) -> Work[Tensor]:
    """Start to collect every rank's `tensor` in `output`, in group order.

    Args:
        output: [n], contiguous.
        tensor: [n / size], contiguous; may be this rank's slice of `output`.
    """
    if _is_local(output, tensor, full=output, group=group):
        return Work.completed(output)
    group.record("all_gather", num_bytes=reduced_bytes(output.nbytes, group.size))
    with translate_errors("all_gather", group):
        if group.is_gloo:
            work = gloo.start_all_gather_into(_as_bytes(output), _as_bytes(tensor), group=group)
            return work.then(lambda _: output)
        flat, part = _as_bytes(output).view(-1), _as_bytes(tensor).view(-1)
        handle = _all_gather_flat(flat, part, group=group.process_group, async_op=True)
    return Work(
        lambda: output, op="all_gather", group=group, handles=[handle], keep=[output, tensor]
    )


def start_all_gather(tensor: Tensor, group: Group, *, dim: int) -> Work[Tensor]:
    """Start to concatenate the tensors of all ranks: [.., n, ..] -> [.., size * n, ..].

    The ranks are in group order along `dim`.

    Args:
        tensor: tensor of the same shape on every rank; must not change before `wait`.
        dim: dim to concatenate along.
    """
    if group.size == 1:
        return Work.completed(tensor)
    work = start_all_gather_into(
        tensor.new_empty((group.size, *tensor.shape)), tensor.contiguous(), group=group
    )
    return work.then(lambda parts: parts.movedim(0, dim).flatten(dim, dim + 1))


def start_reduce_scatter(tensor: Tensor, group: Group, *, dim: int) -> Work[Tensor]:
    """Start to sum and return this rank's slice: [.., size * n, ..] -> [.., n, ..].

    Args:
        tensor: its size along `dim` is a multiple of the group's size; must not change before
            `wait`.
        dim: dim that the sum is split along.
    """
    if group.size == 1:
        return Work.completed(tensor)
    _check_divisible(tensor, group, dim=dim)
    slices = tensor.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    return start_reduce_scatter_into(slices.new_empty(slices.shape[1:]), slices, group=group)


def local_slice(tensor: Tensor, group: Group, *, dim: int) -> Tensor:
    """This rank's one of `size` equal slices along `dim`, a view; no communication."""
    _check_divisible(tensor, group, dim=dim)
    length = tensor.shape[dim] // group.size
    return tensor.narrow(dim, group.index * length, length)


def all_reduce(tensor: Tensor, group: Group, *, op: str = "sum") -> None:
    """All-reduce in place, complete on return; arguments as `start_all_reduce`."""
    start_all_reduce(tensor, group, op=op).wait()


def all_reduce_coalesced(tensors: Sequence[Tensor], group: Group) -> None:
    """`all_reduce` of small flat tensors of one dtype, as one collective."""
    if group.size > 1 and tensors:
        flat = torch.cat(list(tensors))
        all_reduce(flat, group)
        torch._foreach_copy_(
            list(tensors), list(flat.split([tensor.numel() for tensor in tensors]))
        )


def all_gather_into(output: Tensor, tensor: Tensor, *, group: Group) -> None:
    """All-gather into a tensor, complete on return; arguments as `start_all_gather_into`."""
    start_all_gather_into(output, tensor, group=group).wait()


def all_reduce_scalars(values: Sequence[float], group: Group, *, op: str = "sum") -> list[float]:
    """`start_all_reduce_scalars`, complete on return.

    On gloo it is a gather and a broadcast (`reduce_along`), which have no "avg".
    """
    if group.size == 1 or not (group.levels or group.is_gloo):
        return start_all_reduce_scalars(values, group, op=op).wait()
    num_bytes = 2 * reduced_bytes(8 * len(values), group.size)
    group.traffic.record(group.name, "all_reduce_scalars", num_bytes=num_bytes)
    with _blocking("all_reduce_scalars", group, num_bytes=num_bytes):
        return reduce_along(group.levels or (group,), [float(value) for value in values], op=op)


def start_all_reduce_scalars(
    values: Sequence[float], group: Group, *, op: str = "sum"
) -> Work[list[float]]:
    """Start to reduce host numbers over the group in one float64 collective.

    Traffic is counted as "all_reduce_scalars".

    One element costs as much as a thousand (0.3 to 1.5 ms on gloo), so pass all numbers in one
    call. On NCCL the result is copied to the host on a side stream, and `wait` blocks the host
    until it has arrived; a reduction that is started one step before it is read costs no time. Over
    a tree the reduction is complete on return and has no "avg".
    """
    if group.size == 1:
        return Work.completed([float(value) for value in values])
    if group.levels:
        return Work.completed(all_reduce_scalars(values, group, op=op))
    packed = to_device(values, process_group_device(group.process_group))
    group.record("all_reduce_scalars", num_bytes=2 * reduced_bytes(packed.nbytes, group.size))
    with translate_errors("all_reduce_scalars", group):
        handle = dist.all_reduce(packed, op=_OPS[op], group=group.process_group, async_op=True)
        if packed.device.type == "cuda":
            copy = HostCopy.after(handle, packed)
            return Work(copy.read, op="all_reduce_scalars", group=group, keep=[packed, handle])
    return Work(
        packed.tolist, op="all_reduce_scalars", group=group, handles=[handle], keep=[packed]
    )


def all_gather_object(obj: Any, group: Group) -> list[Any]:
    """Every rank's picklable object, in group order."""
    if group.size == 1:
        return [obj]
    with _blocking("all_gather_object", group):
        if group.levels:
            gathered: list[Any] = broadcast_along(group.levels, gather_along(group.levels, obj))
            return gathered
        gathered = [None] * group.size
        dist.all_gather_object(gathered, obj, group=group.process_group)
    return gathered


def gather_object(obj: Any, group: Group) -> list[Any] | None:
    """Every rank's picklable object, in group order, on the first rank; None on the others."""
    if group.size == 1:
        return [obj]
    with _blocking("gather_object", group):
        return gather_along(group.levels or (group,), obj)


def broadcast_object(obj: Any, group: Group) -> Any:
    """The first rank's picklable object, on every rank."""
    if group.size == 1:
        return obj
    with _blocking("broadcast_object", group):
        return broadcast_along(group.levels or (group,), obj)


def gather_along(levels: Sequence[Group], obj: Any) -> list[Any] | None:
    """Every rank's object on the root of a tree, None on the others.

    `levels` are the groups of the tree that this rank is in, from the leaves up.
    """
    gathered = [pickle.dumps(obj)]  # only the root reads it
    for level in levels:
        parts: list[Any] | None = [None] * level.size if level.is_first else None
        dist.gather_object(gathered, parts, group=level.process_group, group_dst=0)
        if parts is None:
            return None
        gathered = [message for part in parts for message in part]
    return [pickle.loads(message) for message in gathered]


def broadcast_along(levels: Sequence[Group], obj: Any) -> Any:
    """The root's object, on every rank; what other ranks pass is ignored.

    torch sends the size and then the bytes, 2.5 ms on 4 ranks of 2 cores (measured); no step waits
    for an object.
    """
    objects = [obj]
    for level in reversed(levels):
        dist.broadcast_object_list(objects, group=level.process_group, group_src=0)
    return objects[0]


def reduce_along(levels: Sequence[Group], numbers: Sequence[float], *, op: str) -> list[float]:
    """Numbers reduced elementwise, the same bits on every rank; `op` is "sum", "max" or "min".

    gloo's all-reduce is a ring of 2 * (size - 1) messages in a row. Ranks that share cores wait for
    a time slice in each: on 4 ranks of 2 cores an all-reduce of 16 numbers takes 5.5 ms, a gather
    and a broadcast 1 ms (measured).
    """
    total = torch.tensor(numbers, dtype=torch.float64)
    for level in levels:
        parts = [torch.empty_like(total) for _ in level.ranks] if level.is_first else None
        dist.gather(total, parts, group=level.process_group, group_dst=0)
        if parts is None:
            break
        total = _REDUCE[op](torch.stack(parts), dim=0)
    for level in reversed(levels):
        dist.broadcast(total, group=level.process_group, group_src=0)
    reduced: list[float] = total.tolist()
    return reduced


@contextmanager
def _blocking(op: str, group: Group, *, num_bytes: int = 0) -> Iterator[None]:
    """Record a blocking collective of host data in the heartbeat, and translate its errors."""
    group.heartbeat.started(group.name, op, num_bytes=num_bytes)
    with waiting(op, group, sequence=group.heartbeat.sequence(group.name)):
        yield


def barrier(group: Group) -> None:
    """Return once every rank of the group has called it; blocks the host, on CUDA too."""
    # Not dist.barrier: on NCCL it guesses a device and does not block the host.
    all_reduce_scalars([0.0], group)


def _check_divisible(tensor: Tensor, group: Group, *, dim: int) -> None:
    size = tensor.shape[dim]
    assert size % group.size == 0, (
        f"{size} elements of dim {dim} cannot be split into {group.size} equal slices"
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    """fp8 values as uint8: not every process group supports fp8, and a gather copies bytes only."""
    return (
        tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
    )


def _is_local(output: Tensor, tensor: Tensor, *, full: Tensor, group: Group) -> bool:
    """Check the tensors of a collective; in a group of one rank, copy and return True."""
    part = tensor if full is output else output
    assert part.numel() * group.size == full.numel(), "unequal slices would reach the wrong rank"
    assert part.dtype == full.dtype, f"the bytes of {full.dtype} would be read as {part.dtype}"
    assert part.is_contiguous() and full.is_contiguous(), (
        "slices are taken in memory order, not by strides"
    )
    if group.size == 1 and (output.data_ptr() != tensor.data_ptr() or output.is_meta):
        output.copy_(tensor.view_as(output))
    return group.size == 1
