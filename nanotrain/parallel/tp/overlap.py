"""Products in pieces that overlap with the transfers of sequence parallelism (--tp-comm-overlap).

    gather_products    all-gather of an input along the sequence, then its products
    scatter_product    a product of partial sums, then their reduce-scatter along the sequence

    rank 0 of 3, all-gather         rank 0 of 3, reduce-scatter
    x0 W | x1 W | x2 W              y1 | y2 | y0          products, of tokens of the named rank
    <- x1, x2 are received ->          y1, y2 are sent    transfers, one piece per other rank

A rank multiplies its own tokens while those of the next rank are received; it computes its own part
of a sum last, while the others are sent. Products are not split over their inner dim, so pieces
have the values of the whole product; partial sums are added once, in fp32 and in the order of
ranks.

    OVERLAPS    by name, chosen when the layers are built:
                symmetric   torch.ops.symm_mem.fused_all_gather_matmul, fused_matmul_reduce_scatter:
                            copies between GPUs of a node without a kernel of NCCL
                pieces      all-to-alls of the group (comm/pieces.py), on any device and network

Megatron-LM, `--tp-comm-overlap`; Wang et al. 2023, "Overlap communication with dependent
computation via decomposition"; torch/distributed/_symmetric_memory.

    B batch   S sequence   I inputs   O outputs
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.pieces import start_shift
from nanotrain.comm.symmetric_memory import group_name
from nanotrain.parallel.tp.region import SEQUENCE


@dataclass(frozen=True)
class Gathered:
    """The result of `gather_products`."""

    outputs: tuple[Tensor, ...]  # one [B, S, O] per matrix
    gathered: Tensor | None  # [B, S, I]; None where it was not asked for


@dataclass(frozen=True)
class OverlappedProducts:
    """An implementation of products that overlap with transfers."""

    gather: Callable[..., Gathered]  # as `gather_products`
    scatter: Callable[..., Tensor]  # as `scatter_product`


def gather_products(
    name: str, x: Tensor, *, matrices: Sequence[Tensor], group: Group, keeps_input: bool = False
) -> Gathered:
    """Gather an input along the sequence and multiply it.

    Args:
        name: key of OVERLAPS.
        x: [B, S/tp, I], of this rank.
        matrices: [I, O] of this rank.
        group: the tp group.
        keeps_input: return the gathered input too.
    """
    implementation = OVERLAPS[name]
    return implementation.gather(x, matrices=matrices, group=group, keeps_input=keeps_input)


def scatter_product(name: str, x: Tensor, *, matrix: Tensor, group: Group) -> Tensor:
    """[B, S, I], [I, O] -> the sum of the ranks' products, [B, S/tp, O] of this rank's tokens."""
    return OVERLAPS[name].scatter(x, matrix=matrix, group=group)


def _gather_pieces(
    x: Tensor, *, matrices: Sequence[Tensor], group: Group, keeps_input: bool
) -> Gathered:
    """Start all pieces, and multiply each as it arrives, the tokens of this rank first."""
    x = x.contiguous()
    batch, length, width = x.shape
    pieces = [
        start_shift(x, group, distance=distance, op="all_gather")
        for distance in range(1, group.size)
    ]
    outputs = tuple(
        x.new_empty((batch, group.size * length, matrix.shape[1])) for matrix in matrices
    )
    gathered: Tensor | None = None
    if keeps_input:
        gathered = x.new_empty((batch, group.size * length, width))
    for distance in range(group.size):
        piece = x if distance == 0 else pieces[distance - 1].wait()
        rows = _rows(group, distance, length=length)
        for matrix, output in zip(matrices, outputs, strict=True):
            _multiply(piece, matrix, out=output[:, rows])
        if gathered is not None:
            gathered[:, rows] = piece
    return Gathered(outputs, gathered)


def _scatter_pieces(x: Tensor, *, matrix: Tensor, group: Group) -> Tensor:
    """Send each piece while the next one is computed, the tokens of this rank last."""
    length = x.shape[SEQUENCE] // group.size
    shape = (x.shape[0], length, matrix.shape[1])
    pieces = []
    for distance in range(1, group.size):
        partial_sum = x.new_empty(shape)
        _multiply(x[:, _rows(group, distance, length=length)], matrix, out=partial_sum)
        pieces.append(start_shift(partial_sum, group, distance=-distance, op="reduce_scatter"))
    own = x.new_empty(shape)
    _multiply(x[:, _rows(group, 0, length=length)], matrix, out=own)
    by_rank = [own] * group.size
    for distance, piece in enumerate(pieces, start=1):
        by_rank[(group.index - distance) % group.size] = piece.wait()
    return torch.stack(by_rank).sum(0)


def _rows(group: Group, distance: int, *, length: int) -> slice:
    """The tokens of the rank at a distance from this one."""
    first = (group.index + distance) % group.size * length
    return slice(first, first + length)


def _multiply(x: Tensor, matrix: Tensor, *, out: Tensor) -> None:
    """[B, s, I], [I, O] -> `out` [B, s, O], which may be rows of a larger tensor."""
    if len(x) == 1:
        torch.mm(x[0], matrix, out=out[0])
    else:
        torch.bmm(x, matrix.expand(len(x), -1, -1), out=out)


def _gather_symmetric(
    x: Tensor, *, matrices: Sequence[Tensor], group: Group, keeps_input: bool
) -> Gathered:
    """torch's products over symmetric memory."""
    group.record("all_gather", num_bytes=(group.size - 1) * x.nbytes)
    gathered, outputs = torch.ops.symm_mem.fused_all_gather_matmul(
        x.contiguous(), list(matrices), SEQUENCE, group_name(group), return_A=keeps_input
    )
    return Gathered(tuple(output.contiguous() for output in outputs), gathered)


def _scatter_symmetric(x: Tensor, *, matrix: Tensor, group: Group) -> Tensor:
    """torch's product over symmetric memory; it adds partial sums in fp32."""
    num_elements = x[..., 0].numel() * matrix.shape[1]
    group.record(
        "reduce_scatter", num_bytes=num_elements * x.itemsize * (group.size - 1) // group.size
    )
    out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x, matrix, "sum", SEQUENCE, group_name(group)
    )
    return out


OVERLAPS = {
    "pieces": OverlappedProducts(_gather_pieces, _scatter_pieces),
    "symmetric": OverlappedProducts(_gather_symmetric, _scatter_symmetric),
}
