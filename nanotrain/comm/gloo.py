"""Reduce-scatter and all-gather for gloo by direct sends.

Each of d ranks sends (d-1)/d of the tensor, the minimum.

gloo's own reduce-scatter runs a full all-reduce and rounds bf16 and fp16 after every addition. Here
each rank sends slice i to rank i, which sums the d versions in rank order in fp32 and rounds once:

    rank 0  [a0 a1 a2 a3]        rank 2 receives a2, b2 and d2 into a temporary buffer and
    rank 1  [b0 b1 b2 b3]        writes a2 + b2 + c2 + d2 to its output
    rank 2  [c0 c1 c2 c3]
    rank 3  [d0 d1 d2 d3]

gloo's own all-gather copies the result once more; here slices are received into the output.
Transfers run in gloo's own thread; `wait` computes the sum chunk by chunk while later chunks are
still being received.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.work import Work

# Elements per message. Of the sizes from 64 Ki to the full slice, measured on 1 to 128 MiB, this
# one is large enough to hide the cost of a message (20 us) and small enough that the sum of a chunk
# overlaps the transfer of the next.
_CHUNK = 1 << 20
_LOW_PRECISION = (torch.bfloat16, torch.float16)


def start_reduce_scatter_into(
    output: Tensor, tensor: Tensor, *, group: Group, averages: bool = False
) -> Work[Tensor]:
    """Start a reduce-scatter of `tensor` [n] into `output` [n / size].

    Slice i is sent to rank i; `wait` sums the received slices.

    With `averages` the sum is divided by the number of ranks before it is rounded.
    """
    slices, received = (
        tensor.view(group.size, -1),
        output.new_empty((group.size - 1, output.numel())),
    )
    versions = list(received)
    versions.insert(group.index, slices[group.index])
    divisor = group.size if averages else 1
    receives: dict[tuple[int, int], dist.Work] = {}  # by start of the chunk and sending rank
    sends: list[dist.Work] = []
    for chunk in _chunks(output.numel()):
        for source, target in _peers(group):
            receives[chunk.start, source] = _start(
                dist.irecv, versions[source][chunk], peer=source, group=group
            )
            sends.append(_start(dist.isend, slices[target][chunk], peer=target, group=group))

    def finish() -> Tensor:
        """Wait for the chunks of all peers, sum them in rank order, and wait for the sends."""
        total = output.view(-1)
        for chunk in _chunks(output.numel()):
            for source, _ in _peers(group):
                group.wait(receives[chunk.start, source])
            _sum_in_order(
                total[chunk],
                [version[chunk] for version in versions],
                local=group.index,
                divisor=divisor,
            )
        for handle in sends:
            group.wait(handle)
        return output

    return Work(finish, op="reduce_scatter", group=group, keep=[output, tensor, received])


def start_all_gather_into(output: Tensor, tensor: Tensor, *, group: Group) -> Work[Tensor]:
    """Start to send `tensor` [n / size] to every rank and to receive theirs into `output` [n]."""
    slices, local = output.view(group.size, -1), tensor.view(-1)
    handles = []
    for source, target in _peers(group):
        handles.append(_start(dist.irecv, slices[source], peer=source, group=group))
        handles.append(_start(dist.isend, local, peer=target, group=group))
    if slices[group.index].data_ptr() != local.data_ptr():
        slices[group.index].copy_(local)
    return Work(
        lambda: output, op="all_gather", group=group, handles=handles, keep=[output, tensor]
    )


def _sum_in_order(output: Tensor, versions: list[Tensor], *, local: int, divisor: int) -> None:
    """output = (versions[0] + versions[1] + ...) / divisor; low precision sums in fp32."""
    if output.dtype in _LOW_PRECISION:
        total = versions[0].float()
        for version in versions[1:]:
            total.add_(version)
        output.copy_(total.div_(divisor) if divisor > 1 else total)
        return
    # `output` may alias the local version, which is still needed until it is added and otherwise
    # must not change. So the partial sum overwrites the first received version, or `output` where
    # the first version is the local one.
    total, partial = versions[0], output if local == 0 else versions[0]
    for version in versions[1:-1]:
        total = torch.add(total, version, out=partial)
    torch.add(total, versions[-1], out=output)
    if divisor > 1:
        output.div_(divisor)


def _peers(group: Group) -> Iterator[tuple[int, int]]:
    """(source, target) of each round, as indices in the group; in a round each rank is the target
    of one other.
    """
    for step in range(1, group.size):
        yield (group.index - step) % group.size, (group.index + step) % group.size


def _chunks(numel: int) -> Iterator[slice]:
    for start in range(0, numel, _CHUNK):
        yield slice(start, min(start + _CHUNK, numel))


def _start(
    operation: Callable[..., dist.Work | None], tensor: Tensor, *, peer: int, group: Group
) -> dist.Work:
    """Start a send or a receive."""
    work = operation(tensor, group.ranks[peer], group=group.process_group)
    assert work is not None, "torch returns None only on a rank outside the group"
    return work
