"""Attention in blocks of queries: the same bits over any cp, the values of plain attention."""

import pytest
import torch
from torch import Tensor

from nanotrain.attention.sdpa import SDPAttention
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.cp.block_attention import BlockAttention
from nanotrain.parallel.cp.split import join_shards, local_chunks
from tests.harness import run_ranks

LENGTH, BLOCK = 16, 4


def drawn() -> list[Tensor]:
    """Query, key, value and the gradient of the output, [B, S, heads, D]."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, LENGTH, heads, 6) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=draw) for shape in shapes]


def run_attention(ctx: ParallelContext, window: int | None) -> Tensor:
    """Output and gradients of this rank, [4, B, S / cp, ...] flattened over the heads."""
    group = ctx.group("cp")
    local = [local_chunks(x, index=group.index, size=group.size) for x in drawn()]
    if group.size == 1:
        local = drawn()
    query, key, value = (x.clone().requires_grad_() for x in local[:3])
    attention = BlockAttention(group, BLOCK)
    mask = attention.plan_mask(None, tokens=query[:, :, 0, 0], window=window)
    out = attention(query, key=key, value=value, mask=mask, scores=None)
    out.backward(local[3])
    return torch.cat([x.flatten(2) for x in (out.detach(), query.grad, key.grad, value.grad)], 2)


@pytest.mark.parametrize("window", [None, 5])
def test_two_ranks_have_the_bits_of_one(window: int | None) -> None:
    (full,) = run_ranks(1, run_attention, window, shares=True)
    shards = run_ranks(2, run_attention, window, shares=True, cp=2)
    assert torch.equal(join_shards(torch.stack(shards)), full)


def test_the_values_are_those_of_plain_attention() -> None:
    (full,) = run_ranks(1, run_attention, None, shares=True)
    query, key, value, grad = drawn()
    tensors = [x.requires_grad_() for x in (query, key, value)]
    out = SDPAttention()(query, key=key, value=value, mask=None, scores=None)
    out.backward(grad)
    expected = torch.cat([x.flatten(2) for x in (out.detach(), *(x.grad for x in tensors))], 2)
    torch.testing.assert_close(full, expected, rtol=1e-5, atol=1e-5)


def test_local_blocks_follow_the_chunks_of_a_rank() -> None:
    attention = BlockAttention(Group.single_rank("cp"), 2)
    assert attention.local_blocks(4) == [range(2), range(2, 4)]
    assert attention.local_blocks(5) == [range(5)]


def test_a_head_alone_has_the_bits_that_it_has_among_others() -> None:
    draw = torch.Generator().manual_seed(3)
    query, key, value, grad = (torch.randn((2, LENGTH, 4, 10), generator=draw) for _ in range(4))
    attention = BlockAttention(Group.single_rank("cp"), BLOCK)

    def run(heads: slice) -> Tensor:
        local = [x[:, :, heads].clone().requires_grad_() for x in (query, key, value)]
        out = attention(local[0], key=local[1], value=local[2], mask=None, scores=None)
        out.backward(grad[:, :, heads])
        return torch.stack([out.detach(), *(x.grad for x in local)])

    together = run(slice(0, 4))
    for head in range(4):
        assert torch.equal(run(slice(head, head + 1)), together[..., head : head + 1, :])
