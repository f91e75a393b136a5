"""The rotary key of multi-head latent attention, which all heads share, with `--invariant`.

Its gradient is a sum over heads: the addends of a block of weights one after another, then the sums
of the blocks in a fixed tree.

    B batch   S sequence   N heads   R rotary channels
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanotrain.model.mla import MultiLatentAttention
from nanotrain.model.rope import Rotary, apply_rotary
from nanotrain.parallel.tp.invariant import UnitBlocks, sum_over_blocks
from nanotrain.parallel.tp.region import TensorParallel


class _ForEveryHead(torch.autograd.Function):
    """A vector of every position, for every head of a rank."""

    @staticmethod
    def forward(
        ctx: Any, shared: Tensor, tensor_parallel: TensorParallel, num_heads: int, num_blocks: int
    ) -> Tensor:
        """[B, S or S/tp, R] -> [B, S, N/tp, R]."""
        ctx.tensor_parallel = tensor_parallel
        ctx.num_blocks = num_blocks
        full = tensor_parallel.start_enter(shared).wait()
        return full[:, :, None].expand(-1, -1, num_heads, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """The sum over the heads of all ranks."""
        parts = []
        for block in grads[0].chunk(ctx.num_blocks, dim=2):
            parts.append(sum_in_order(block))
        total = sum_over_blocks(parts, ctx.tensor_parallel.group).to(grads[0].dtype)
        return ctx.tensor_parallel.local_slice(total), None, None, None


def sum_in_order(heads: Tensor) -> Tensor:
    """[B, S, n, R] -> [B, S, R] fp32, one head after another."""
    first, *others = heads.unbind(dim=2)
    total = first.float()
    for head in others:
        total = total + head
    return total


def use_ordered_heads(attention: MultiLatentAttention, blocks: UnitBlocks) -> Callable[..., Tensor]:
    """Change a layer to add gradients of the shared key in a fixed order; returns its forward."""
    tensor_parallel = attention.tensor_parallel
    num_blocks = blocks.local(tensor_parallel.group)

    def share_key(shared_key: Tensor, rotary: Rotary | None, *, num_heads: int) -> Tensor:
        keys = _ForEveryHead.apply(shared_key, tensor_parallel, num_heads, num_blocks)
        return apply_rotary(keys, rotary)

    attention.share_key = share_key  # type: ignore[method-assign]
    forward: Callable[..., Tensor] = attention.forward
    return forward
