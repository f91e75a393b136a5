"""Full sequences, their attention on one rank, and the shards of a cp rank."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.parallel.cp import CoreAttention, build_core_attention
from nanotrain.parallel.cp.split import local_chunks


@dataclass(frozen=True)
class Shape:
    batch: int = 2
    length: int = 24
    heads: int = 4
    groups: int = 4
    head_dim: int = 8
    value_head_dim: int = 8


@dataclass(frozen=True)
class Tensors:
    """The output and the gradients of query, key and value; or the output's gradient and the three
    inputs.
    """

    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.out, self.query, self.key, self.value))


def random_inputs(shape: Shape, *, dtype: torch.dtype, seed: int = 0) -> Tensors:
    """Random query, key and value, and the gradient of the output (as `out`)."""
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.heads, shape.heads, shape.groups, shape.groups)
    head_dims = (shape.value_head_dim, shape.head_dim, shape.head_dim, shape.value_head_dim)
    return Tensors(
        *(
            torch.randn(
                shape.batch, shape.length, n, head_dim, generator=generator, dtype=torch.float64
            ).to(dtype)
            for n, head_dim in zip(heads, head_dims, strict=True)
        )
    )


def segments(shape: Shape) -> Tensor:
    """[B, S] int32: borders at different positions in every row, some of them inside a chunk."""
    positions = torch.arange(shape.length)
    borders = [[5, 6, 17], [shape.length // 2], []]
    rows = [
        sum((positions >= border).int() for border in borders[row % 3])
        for row in range(shape.batch)
    ]
    return torch.stack(
        [torch.as_tensor(row, dtype=torch.int32).expand(shape.length) for row in rows]
    )


def full_mask(segment_ids: Tensor | None, *, length: int, window: int | None = None) -> Tensor:
    """[B or 1, 1, S, S] bool: causal, within segments and a window."""
    positions = torch.arange(length)
    allowed = positions[:, None] >= positions
    if window is not None:
        allowed &= positions >= positions[:, None] - window
    if segment_ids is not None:
        allowed = allowed & (segment_ids[:, :, None] == segment_ids[:, None])
    return allowed.view(-1, 1, length, length)


def run_dense(inputs: Tensors, mask: Tensor) -> Tensors:
    """Output and gradients of softmax attention written out, with a dense mask, in fp64."""
    query, key, value = (
        x.double().transpose(1, 2).requires_grad_()
        for x in (inputs.query, inputs.key, inputs.value)
    )
    repeated = [x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value)]
    scores = (query @ repeated[0].mT * query.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    out = scores.softmax(-1) @ repeated[1]
    grads = torch.autograd.grad(out, (query, key, value), inputs.out.double().transpose(1, 2))
    return Tensors(*(x.detach().transpose(1, 2) for x in (out, *grads)))


def run(
    core_attention: CoreAttention,
    inputs: Tensors,
    segment_ids: Tensor | None = None,
    *,
    window: int | None = None,
) -> Tensors:
    """Forward and backward of a core attention."""
    query, key, value = (
        tensor.clone().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)
    )
    mask = core_attention.plan_mask(segment_ids, tokens=query[:, :, 0, 0], window=window)
    out = core_attention(query, key=key, value=value, mask=mask, scores=None)
    out.backward(inputs.out)
    assert query.grad is not None and key.grad is not None and value.grad is not None
    return Tensors(out.detach(), query.grad, key.grad, value.grad)


def shard(tensors: Tensors, group: Group) -> Tensors:
    return Tensors(
        *(local_chunks(tensor, index=group.index, size=group.size) for tensor in tensors)
    )


def largest_error(
    comm_type: str,
    group: Group,
    shape: Shape,
    *,
    dtype: torch.dtype,
    with_segments: bool,
    window: int | None = None,
) -> float:
    """Of output and gradients against the formula in fp64, relative to the largest value of each."""
    inputs = random_inputs(shape, dtype=dtype)
    segment_ids = segments(shape) if with_segments else None
    mask = full_mask(segment_ids, length=shape.length, window=window)
    expected = shard(run_dense(inputs, mask), group)
    result = run(
        build_core_attention(comm_type, group), shard(inputs, group), segment_ids, window=window
    )
    assert [x.dtype for x in result] == [dtype] * 4
    return max(
        ((x.double() - y).abs().max() / y.abs().max()).item()
        for x, y in zip(result, expected, strict=True)
    )
