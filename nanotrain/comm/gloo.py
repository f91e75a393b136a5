"""Reduce-scatter and all-gather for gloo by direct sends: each byte travels once, (d-1)/d of the tensor in all.

gloo's own reduce-scatter runs a whole all-reduce and, for bf16 and fp16, rounds at every hop. Here every member sends
each slice to its owner, who sums the d versions in rank order and in fp32, rounding once:

    rank 0  [a0 a1 a2 a3]        rank 2 receives a2, b2 and d2 into scratch memory and
    rank 1  [b0 b1 b2 b3]        writes a2 + b2 + c2 + d2 to its output
    rank 2  [c0 c1 c2 c3]
    rank 3  [d0 d1 d2 d3]

Its all-gather copies the whole result once more; here slices arrive where they belong. The transfers run in gloo's
own thread; only the sum is left to `wait`, chunk by chunk while later chunks are still on their way.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.work import Work

# Elements sent at a time. Measured from 64 Ki to the whole slice on 1 to 128 MiB: the sum of a chunk hides behind the
# transfer of the next, and the cost of a message (20 us) does not show.
_CHUNK = 1 << 20
_NARROW = (torch.bfloat16, torch.float16)


def start_reduce_scatter_into(output: Tensor, tensor: Tensor, *, group: Group) -> Work:
    """Begin to send every slice of `tensor` [n] to its owner; `wait` sums the own one into `output` [n / size]."""
    slices, scratch = tensor.view(group.size, -1), group.scratch.take(tensor.numel() - output.numel(), output.dtype)
    received = list(scratch.view(group.size - 1, -1))
    received.insert(group.index, slices[group.index])
    exchange = _Exchange(output.view(-1), received, group.index, {}, [])
    for chunk in _chunks(output.numel()):
        for partner in _partners(group):
            arriving, leaving = received[partner.source][chunk], slices[partner.target][chunk]
            exchange.receives[chunk.start, partner.source] = _receive(arriving, partner.source, group=group)
            exchange.sends.append(_send(leaving, partner.target, group=group))

    def finish() -> None:
        exchange.finish()
        group.scratch.give(scratch)

    return Work("reduce_scatter", group, finish=finish, keep=(tensor,))


def start_all_gather_into(output: Tensor, tensor: Tensor, *, group: Group) -> Work:
    """Begin to send `tensor` [n / size] to every member and to receive theirs in `output` [n]."""
    slices, own = output.view(group.size, -1), tensor.view(-1)
    works = []
    for partner in _partners(group):
        works.append(_receive(slices[partner.source], partner.source, group=group))
        works.append(_send(own, partner.target, group=group))
    if slices[group.index].data_ptr() != own.data_ptr():
        slices[group.index].copy_(own)
    return Work("all_gather", group, works=works, keep=(output, tensor))


@dataclass(frozen=True)
class _Exchange:
    """A reduce-scatter under way.

    Args:
        output: [n / size].
        received: the versions of this member's slice in rank order, the own one among them.
        own: its place among them.
        receives: the transfer of each chunk by (start, member).
        sends: the transfers to others.
    """

    output: Tensor
    received: list[Tensor]
    own: int
    receives: dict[tuple[int, int], dist.Work]
    sends: list[dist.Work]

    def finish(self) -> None:
        """Sum every chunk once its last version is here."""
        for chunk in _chunks(self.output.numel()):
            for member in range(len(self.received)):
                if (chunk.start, member) in self.receives:
                    self.receives[chunk.start, member].wait()
            _sum_in_order(self.output[chunk], [version[chunk] for version in self.received], own=self.own)
        for work in self.sends:
            work.wait()


def _sum_in_order(output: Tensor, versions: list[Tensor], *, own: int) -> None:
    """output = versions[0] + versions[1] + ..., in fp32 where the dtype is narrower."""
    if output.dtype in _NARROW:
        total = versions[0].float()
        for version in versions[1:]:
            total.add_(version)
        output.copy_(total)
        return
    # `output` may be the memory of the own version, which is needed until its turn and, elsewhere, must stay as it is:
    # the running total goes where the first version was received, and to `output` only where that is the own one.
    total, room = versions[0], output if own == 0 else versions[0]
    for version in versions[1:-1]:
        total = torch.add(total, version, out=room)
    torch.add(total, versions[-1], out=output)


@dataclass(frozen=True)
class _Partner:
    """Whom to receive from and whom to send to, as indices in the group."""

    source: int
    target: int


def _partners(group: Group) -> Iterator[_Partner]:
    """Every other member once, each rank beginning with another one so that no member is asked by all at once."""
    for step in range(1, group.size):
        yield _Partner((group.index - step) % group.size, (group.index + step) % group.size)


def _chunks(numel: int) -> Iterator[slice]:
    for start in range(0, numel, _CHUNK):
        yield slice(start, min(start + _CHUNK, numel))


def _receive(tensor: Tensor, member: int, *, group: Group) -> dist.Work:
    return _started(dist.irecv(tensor, src=group.ranks[member], group=group.process_group))


def _send(tensor: Tensor, member: int, *, group: Group) -> dist.Work:
    return _started(dist.isend(tensor, dst=group.ranks[member], group=group.process_group))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "only a rank outside the group gets no handle"
    return work
