"""Whole sequences, what attention makes of them on one rank, and the parts that a rank of cp should get."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.parallel.cp.attention import CoreAttention, build_core_attention
from nanotrain.parallel.cp.sdpa import SDPAttention
from nanotrain.parallel.cp.split import own_chunks


@dataclass(frozen=True)
class Shape:
    batch: int = 2
    length: int = 24
    heads: int = 4
    groups: int = 4
    width: int = 8
    value_width: int = 8


@dataclass(frozen=True)
class Attended:
    """The output and the gradients of query, key and value."""

    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor

    def __iter__(self):
        return iter((self.out, self.query, self.key, self.value))


def sequences(shape: Shape, *, dtype: torch.dtype, seed: int = 0) -> Attended:
    """Random query, key and value, and the gradient of the output (in place of the output)."""
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.heads, shape.heads, shape.groups, shape.groups)
    widths = (shape.value_width, shape.width, shape.width, shape.value_width)
    return Attended(
        *(
            torch.randn(shape.batch, shape.length, n, width, generator=generator, dtype=torch.float64).to(dtype)
            for n, width in zip(heads, widths, strict=True)
        )
    )


def documents(shape: Shape) -> Tensor:
    """[B, S] int32: borders at different places in every row, some of them inside a chunk."""
    places = torch.arange(shape.length)
    borders = [[5, 6, 17], [shape.length // 2], []]
    rows = [sum((places >= border).int() for border in borders[row % 3]) for row in range(shape.batch)]
    return torch.stack([torch.as_tensor(row, dtype=torch.int32).expand(shape.length) for row in rows])


def run(core_attention: CoreAttention, given: Attended, segment_ids: Tensor | None = None) -> Attended:
    """Forward and backward of a core on what `given` holds."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in (given.query, given.key, given.value))
    mask = core_attention.plan_mask(segment_ids, tokens=query[:, :, 0, 0])
    out = core_attention(query, key=key, value=value, mask=mask)
    out.backward(given.out)
    assert query.grad is not None and key.grad is not None and value.grad is not None
    return Attended(out.detach(), query.grad, key.grad, value.grad)


def part(whole: Attended, group: Group) -> Attended:
    return Attended(*(own_chunks(tensor, index=group.index, size=group.size) for tensor in whole))


def largest_error(comm_type: str, group: Group, shape: Shape, *, dtype: torch.dtype, with_documents: bool) -> float:
    """Of output and gradients against the plain core on one rank in fp64, relative to the largest value of each."""
    given = sequences(shape, dtype=dtype)
    segment_ids = documents(shape) if with_documents else None
    expected = part(run(SDPAttention(), Attended(*(x.double() for x in given)), segment_ids), group)
    found = run(build_core_attention(comm_type, group), part(given, group), segment_ids)
    assert [x.dtype for x in found] == [dtype] * 4
    return max(((x.double() - y).abs().max() / y.abs().max()).item() for x, y in zip(found, expected, strict=True))
