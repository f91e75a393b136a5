"""The loss over a sharded vocabulary whose results do not depend on the layout, in any bit.

    logits_k   = x W_k^T                  one product per block k of the vocabulary
    largest    = max over all blocks      exact
    total      = tree(sum exp(logits_k - largest))
    loss       = log(total) + largest - logit of the label, on a grid, so that sums are exact
    d logits_k = (exp(logits_k - largest) / total - label) * mask
    dx         = tree(d logits_k W_k)     dW_k: an exact sum over blocks of positions

Logits are computed again in the backward, one sample at a time.

    B batch   S sequence   H hidden   V vocabulary   Vp vocabulary with padding
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.collectives import start_all_gather
from nanotrain.comm.group import Group
from nanotrain.kernels.exact_sums import (
    LOSS_GRID,
    UNITS,
    from_units,
    largest_magnitude,
    nan_if_inexact,
    on_grid,
    tree_sum,
)
from nanotrain.parallel.tp.invariant import (
    UnitBlocks,
    multiply,
    sum_over_blocks,
    weight_gradient,
)
from nanotrain.parallel.tp.loss import Targets


@dataclass(frozen=True)
class BlockedVocabulary:
    """The blocks of the vocabulary of one rank."""

    blocks: UnitBlocks
    group: Group  # shards the vocabulary
    size: int  # V, without padding

    def logits(self, rows: Tensor, weight: Tensor) -> list[Tensor]:
        """[L, b, H], [Vp/tp, H] -> one [L, b, width] fp32 per block; padding is -infinity."""
        num_blocks = self.blocks.local(self.group)
        first = self.group.index * len(weight)
        logits = []
        for part in weight.chunk(num_blocks):
            block = multiply(rows, part.t()).float()
            num_used = min(max(self.size - first, 0), len(part))
            block[..., num_used:] = -torch.inf
            logits.append(block)
            first += len(part)
        return logits

    def positions(self, labels: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The columns [L, b, 1] of the labels in each block, and whether they are in it."""
        num_blocks = self.blocks.local(self.group)
        width = len(weight) // num_blocks
        first = self.group.index * len(weight)
        found = []
        for index in range(num_blocks):
            columns = labels[..., None] - (first + index * width)
            is_inside = (columns >= 0) & (columns < width)
            found.append((columns.clamp(0, width - 1), is_inside))
        return found

    def normalizer(self, logits: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The largest logits and the sums of exponentials [L, b, 1] over all ranks."""
        largest = torch.cat([block.amax(-1, keepdim=True) for block in logits], -1)
        largest = largest.amax(-1, keepdim=True)
        if self.group.size > 1:
            shards = start_all_gather(largest.contiguous(), self.group, dim=2).wait()
            largest = shards.amax(-1, keepdim=True)
        sums = [(block - largest).exp_().sum(-1, keepdim=True) for block in logits]
        return largest, sum_over_blocks(sums, self.group)

    def label_logits(self, logits: list[Tensor], labels: Tensor, *, weight: Tensor) -> Tensor:
        """[L, b, 1], the logits of the labels; each is in one block of one rank."""
        total = torch.full_like(logits[0][..., :1], -0.0)
        for block, (columns, is_inside) in zip(logits, self.positions(labels, weight), strict=True):
            total = total + block.gather(-1, columns).masked_fill_(~is_inside, -0.0)
        if self.group.size == 1:
            return total
        shards = start_all_gather(total[None].contiguous(), self.group, dim=0).wait()
        return tree_sum(shards.unbind())


class _CrossEntropy(torch.autograd.Function):
    """The sum of the losses of hidden states [B, S, H], an fp64 scalar on a grid."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Targets,
        vocabulary: BlockedVocabulary,
    ) -> Tensor:
        """Labels and mask of the targets are [B, S]."""
        labels = targets.labels
        mask = targets.loss_mask
        ctx.save_for_backward(hidden, weight, labels, mask)
        ctx.vocabulary = vocabulary
        losses = []
        for sample in range(len(hidden)):
            rows = vocabulary.blocks.rows(hidden[sample : sample + 1])
            wanted = labels[sample].view(rows.shape[:2])
            logits = vocabulary.logits(rows, weight)
            largest, total = vocabulary.normalizer(logits)
            picked = vocabulary.label_logits(logits, wanted, weight=weight)
            losses.append((total.log() + largest - picked).flatten())
        per_token = torch.stack(losses) * mask
        on = on_grid(per_token.double(), LOSS_GRID)
        if targets.groups is not None and vocabulary.group.is_first:
            targets.groups.add(on.flatten(), mask.flatten().double(), chunk=slice(None))
        magnitude = largest_magnitude(on / LOSS_GRID)
        ctx.fault = nan_if_inexact(magnitude, num_addends=vocabulary.blocks.num_tokens)
        return on.sum() + ctx.fault

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the hidden states, and of the weight in fp64."""
        hidden, weight, labels, mask = ctx.saved_tensors
        vocabulary: BlockedVocabulary = ctx.vocabulary
        num_blocks = vocabulary.blocks.local(vocabulary.group)
        needs_dgrad, trains_weight = ctx.needs_input_grad[:2]
        total: Tensor | None = None
        scale = (grads[0] + ctx.fault).float()  # the step of such a loss is skipped
        grad_hidden = torch.empty_like(hidden) if needs_dgrad else None
        for sample in range(len(hidden)):
            rows = vocabulary.blocks.rows(hidden[sample : sample + 1])
            wanted = labels[sample].view(rows.shape[:2])
            factors = mask[sample].view(*rows.shape[:2], 1) * scale
            grad_logits = _logit_gradients(
                rows, weight, labels=wanted, factors=factors, vocabulary=vocabulary
            )
            if grad_hidden is not None:
                parts = [
                    multiply(grad, part)
                    for grad, part in zip(grad_logits, weight.chunk(num_blocks), strict=True)
                ]
                grad_rows = sum_over_blocks(parts, vocabulary.group)
                grad_hidden[sample] = grad_rows.view(hidden.shape[1:])
            if trains_weight:
                scaled = torch.stack(grad_logits) * UNITS
                num_addends = vocabulary.blocks.num_rows
                part = weight_gradient(scaled, rows[None], num_addends=num_addends)
                total = part if total is None else total + part
        grad_weight = None if total is None else from_units(total).flatten(0, 1)
        return grad_hidden, grad_weight, None, None


def _logit_gradients(
    rows: Tensor,
    weight: Tensor,
    *,
    labels: Tensor,
    factors: Tensor,
    vocabulary: BlockedVocabulary,
) -> list[Tensor]:
    """(softmax - label) * factors per block, in the dtype of the hidden states."""
    logits = vocabulary.logits(rows, weight)
    largest, total = vocabulary.normalizer(logits)
    gradients = []
    for block, (columns, is_inside) in zip(
        logits, vocabulary.positions(labels, weight), strict=True
    ):
        block = block.sub_(largest).exp_().div_(total)
        block.scatter_add_(-1, columns, -is_inside.float())
        gradients.append(block.mul_(factors).to(rows.dtype))
    return gradients


def blocked_cross_entropy(
    hidden: Tensor, weight: Tensor, *, targets: Targets, vocabulary: BlockedVocabulary
) -> Tensor:
    """The sum over unmasked tokens of -log softmax(hidden @ weight.T)[label], fp64.

    Args:
        hidden: [B, S, H], the same on every rank of the group.
        weight: [Vp/tp, H], the local shard.
        targets: labels and mask, [B, S] each.
        vocabulary: the blocks.
    """
    loss: Tensor = _CrossEntropy.apply(hidden, weight, targets, vocabulary)
    return loss
