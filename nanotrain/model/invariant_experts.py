"""Experts and routers whose results do not depend on the layout, in any bit (`--invariant`).

Which tokens an expert gets together follows from the layout, so a product takes the tokens of one
token block alone: a few neighbouring positions of one sample, each in its own row, in every layout.
Rows of tokens that chose other experts are zero.

    token block      0           1           2          of 4 positions; expert 5 was chosen by +
    positions        + . . +     . . . .     . + . .
    products of 5    [x 0 0 x]               [0 x 0 0]  none where no token chose it

    forward, dgrad   one product per token block and expert, all of one shape
    wgrad            the exact sum of such products (exact_sums.py)
    router           one product per token block
    outputs          of a token's experts are added in the order of its router, in fp32
    over etp         one product per block of the inner width; sums over blocks are a fixed tree

Every rank routes whole token blocks. The row of a token travels with it, as the bits of a whole
number in further columns.

    T tokens of a rank   P permuted tokens   E local experts   H hidden   b positions of a block
    N products           C columns of a slot
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanotrain.comm.group import Group
from nanotrain.kernels.exact_sums import UNITS, from_units
from nanotrain.model.context import LayerContext
from nanotrain.model.moe import MoELayer
from nanotrain.model.router import Router
from nanotrain.parallel.ep.experts import Experts
from nanotrain.parallel.ep.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
)
from nanotrain.parallel.tp.invariant import (
    UnitBlocks,
    in_blocks,
    multiply,
    sum_over_blocks,
    weight_gradient,
)

SLOT_BYTES = 4


class _Joined(torch.autograd.Function):
    """A tensor with several uses whose gradients are added up first, before any other gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x unchanged."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The gradient unchanged, after autograd has added all uses."""
        return grads[0]


@dataclass(frozen=True)
class ProductBlocks:
    """The blocks of experts' matrices over etp: blocks of outputs, or of inputs if `is_row`.

    The first rank has the sum over the blocks of all ranks. The others have -0, so that the token
    dispatcher, which adds the ranks, adds nothing.
    """

    num_addends: int  # of a weight gradient
    num_blocks: int = 1  # of this rank
    group: Group = Group.single_rank("etp")
    is_row: bool = False

    def sum_once(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The sum of the blocks of all ranks, on the first rank."""
        total = sum_over_blocks(parts, self.group).to(dtype)
        return total if self.group.is_first else torch.full_like(total, -0.0)

    def multiply(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """[n, b, I], [O, I] -> [n, b, O]."""
        if self.is_row:
            inputs = in_blocks(rows, self.num_blocks)
            pairs = zip(inputs, in_blocks(matrix, self.num_blocks), strict=True)
            return self.sum_once([multiply(part, block.t()) for part, block in pairs], rows.dtype)
        matrices = matrix.chunk(self.num_blocks)
        return torch.cat([multiply(rows, block.t()) for block in matrices], dim=2)

    def input_gradient(self, grad: Tensor, matrix: Tensor) -> Tensor:
        """[n, b, O], [O, I] -> [n, b, I]."""
        if self.is_row:
            matrices = in_blocks(matrix, self.num_blocks)
            return torch.cat([multiply(grad, block) for block in matrices], dim=2)
        grads = in_blocks(grad, self.num_blocks)
        pairs = zip(grads, matrix.chunk(self.num_blocks), strict=True)
        return self.sum_once([multiply(part, block) for part, block in pairs], grad.dtype)

    def weight_gradient(self, scaled: Tensor, rows: Tensor) -> Tensor:
        """[n, b, O] in units of the grid, [n, b, I] -> [O, I] fp64 in units."""
        if self.is_row:
            inputs = in_blocks(rows, self.num_blocks)
            total = weight_gradient(scaled[None], inputs, num_addends=self.num_addends)
            return total.movedim(0, 1).flatten(1)
        grads = in_blocks(scaled, self.num_blocks)
        total = weight_gradient(grads, rows[None], num_addends=self.num_addends)
        return total.flatten(0, 1)


class _Products(torch.autograd.Function):
    """Products of rows [N, b, I] with the matrices [E, O, I] of their experts."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, counts: list[int], blocks: ProductBlocks
    ) -> Tensor:
        """[N, b, I] -> [N, b, O]; `counts` [E] are the products of each expert, in order."""
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        ctx.blocks = blocks
        matrices = _matrices(weight, rows)
        parts = [
            blocks.multiply(part, matrix)
            for part, matrix in zip(rows.split(counts), matrices, strict=True)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the rows, and of the weight in fp64."""
        rows, weight = ctx.saved_tensors
        needs_dgrad, trains_weight = ctx.needs_input_grad[:2]
        grad_rows = None
        if needs_dgrad:
            parts = [
                ctx.blocks.input_gradient(part, matrix)
                for part, matrix in zip(
                    grads[0].split(ctx.counts), _matrices(weight, rows), strict=True
                )
            ]
            grad_rows = torch.cat(parts)
        grad_weight = None
        if trains_weight:
            grad_weight = weight.new_zeros(weight.shape, dtype=torch.float64)
            matrices = _matrices(grad_weight, grad_weight)
            scaled = (grads[0] * UNITS).split(ctx.counts)
            inputs = rows.split(ctx.counts)
            for index, count in enumerate(ctx.counts):
                if count:
                    matrices[index] = ctx.blocks.weight_gradient(scaled[index], inputs[index])
            from_units(grad_weight)
        return grad_rows, grad_weight, None, None


def _matrices(weight: Tensor, like: Tensor) -> Tensor:
    """A weight [E, O, I], or [O, I] of one expert -> [E, O, I] in the dtype of a tensor."""
    matrices = weight if weight.ndim == 3 else weight[None]
    return matrices.to(like.dtype)


class AppendSlots(nn.Module):
    """Appends to every local token where it lies: its number among the tokens of all ranks.

    It takes the place of the projection of tokens before they are sent, which is the identity.

    Args:
        rank: index of this rank among the ranks that send tokens to the experts of a rank.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H + C]."""
        num_tokens = x.shape[0] * x.shape[1]
        first = self._rank * num_tokens
        slots = torch.arange(first, first + num_tokens, dtype=torch.int32, device=x.device)
        columns = slots[:, None].view(x.dtype).view(*x.shape[:2], -1)
        return torch.cat([x, columns], dim=-1)


class SlotPlan(NamedTuple):
    """The products of permuted tokens."""

    rows: Tensor  # [P] int64, the row of every token among the rows of all products
    counts: list[int]  # [E], the products of each expert


def plan_slots(slots: Tensor, offs: Tensor, *, block_length: int) -> SlotPlan:
    """The products of tokens [P] int32 that are sorted by expert; offs [E] are their ends.

    >>> plan_slots(torch.tensor([0, 3, 9, 1]), torch.tensor([3, 4]), block_length=4)
    SlotPlan(rows=tensor([0, 3, 5, 9]), counts=[2, 1])
    """
    tokens = torch.arange(len(slots), device=slots.device, dtype=offs.dtype)
    experts = torch.searchsorted(offs, tokens, right=True)
    blocks = slots.long() // block_length
    num_blocks = int(blocks.max()) + 1 if len(slots) else 1
    products, number = (experts * num_blocks + blocks).unique(return_inverse=True)
    counts = torch.bincount(products // num_blocks, minlength=len(offs))
    return SlotPlan(number * block_length + slots.long() % block_length, counts.tolist())


@dataclass(frozen=True)
class InvariantExperts:
    """`Experts.forward` by token blocks."""

    experts: Experts
    blocks: UnitBlocks
    etp: Group  # ranks that share the matrices of experts

    def __call__(self, x: Tensor, offs: Tensor) -> Tensor:
        """Tokens with their slots [P, H + C], sorted by expert -> [P, H]."""
        experts = self.experts
        num_columns = SLOT_BYTES // x.itemsize
        slots = x[:, -num_columns:].detach().contiguous().view(torch.int32).flatten()
        plan = plan_slots(slots, offs, block_length=self.blocks.block_length)
        tokens = x[:, :-num_columns]
        num_rows = sum(plan.counts) * self.blocks.block_length
        rows = tokens.new_zeros((num_rows, tokens.shape[1])).index_copy(0, plan.rows, tokens)
        rows = rows.view(-1, self.blocks.block_length, tokens.shape[1])
        num_blocks = self.blocks.num_expert_blocks // self.etp.size
        column = ProductBlocks(self.blocks.num_rows, num_blocks, self.etp)
        row = replace(column, is_row=True)
        inner = _Products.apply(rows, experts.up.weight, plan.counts, column)
        if experts.gate is None:
            inner = experts.activation(inner)
        else:
            gate = _Products.apply(rows, experts.gate.weight, plan.counts, column)
            inner = experts.activation(gate, inner)
        out = _Products.apply(inner, experts.down.weight, plan.counts, row)
        return out.flatten(0, 1).index_select(0, plan.rows)


def blocked_logits(hidden: Tensor, weight: Tensor, *, blocks: UnitBlocks) -> Tensor:
    """`router_logits` by token blocks: [B, S, H], [E, H] -> [B, S, E] fp32."""
    rows = hidden.float().reshape(-1, blocks.block_length, hidden.shape[2])
    logits: Tensor = _Products.apply(rows, weight, [len(rows)], ProductBlocks(blocks.num_rows))
    return logits.view(*hidden.shape[:2], -1)


def use_token_blocks(layer: MoELayer, blocks: UnitBlocks) -> Callable[..., Tensor]:
    """Change an MoE layer so that experts read tokens with their slots; returns its forward."""
    dispatcher = layer.dispatcher
    etp = Group.single_rank("etp")
    rank = 0
    name = type(dispatcher).__name__
    if isinstance(dispatcher, AllToAllTokenDispatcher):
        assert not dispatcher.has_padding, f"{name} sends rows without slots"
        etp = dispatcher.etp
        rank = dispatcher.ep.index * etp.size + etp.index
    else:
        assert isinstance(dispatcher, LocalTokenDispatcher), f"{name} sends no slots"
    layer.fc1_latent_proj = AppendSlots(rank)
    layer.experts.forward = InvariantExperts(  # type: ignore[method-assign]
        layer.experts, blocks.by_token_block(), etp
    )
    start = layer.start

    def start_joined(hidden: Tensor, context: LayerContext) -> Callable[[], Tensor]:
        return start(_Joined.apply(hidden), context)

    layer.start = start_joined  # type: ignore[method-assign]
    forward: Callable[..., Tensor] = layer.forward
    return forward


def use_blocked_logits(router: Router, blocks: UnitBlocks) -> Callable[..., Any]:
    """Let a router compute its logits by token blocks; its forward."""
    router.logits_of = partial(blocked_logits, blocks=blocks)
    forward: Callable[..., Any] = router.forward
    return forward
