"""The loss in blocks of the vocabulary: the same bits on any number of ranks, torch's values."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.tp.invariant import UnitBlocks
from nanotrain.parallel.tp.invariant_loss import BlockedVocabulary, blocked_cross_entropy
from nanotrain.parallel.tp.loss import Targets, TokenGroups
from tests.harness import run_ranks

SIZE, PADDED, HIDDEN = 29, 32, 10
BLOCKS = UnitBlocks(4, block_length=4, num_tokens=16)


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [B, S, H], weight [Vp, H], labels and mask [B, S]."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn((3, 8, HIDDEN), generator=draw)
    weight = torch.randn((PADDED, HIDDEN), generator=draw)
    labels = torch.randint(0, SIZE, (3, 8), generator=draw)
    mask = (torch.rand((3, 8), generator=draw) < 0.7).float()
    return hidden, weight, labels, mask


def run_loss(ctx: ParallelContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, gradients, and sums per group on this rank."""
    group = ctx.group("tp")
    hidden, weight, labels, mask = drawn()
    shard = nn.Parameter(weight.chunk(group.size)[group.index].clone())
    shard.grad_dtype = torch.float64
    hidden.requires_grad_()
    sums = torch.zeros((2, 2), dtype=torch.float64)
    groups = TokenGroups((labels % 2).flatten(), sums)
    targets = Targets(labels, mask, groups)
    vocabulary = BlockedVocabulary(BLOCKS, group, SIZE)
    loss = blocked_cross_entropy(hidden, shard, targets=targets, vocabulary=vocabulary)
    loss.backward(torch.tensor(0.37))
    return loss.detach(), hidden.grad, shard.grad, sums


def test_any_number_of_ranks_has_the_bits_of_one() -> None:
    loss, grad_hidden, grad_weight, sums = run_ranks(1, run_loss, shares=True)[0]
    for tp in (2, 4):
        by_rank = run_ranks(tp, run_loss, shares=True, tp=tp)
        assert all(torch.equal(rank[0], loss) for rank in by_rank)
        assert all(torch.equal(rank[1], grad_hidden) for rank in by_rank)
        assert torch.equal(torch.cat([rank[2] for rank in by_rank]), grad_weight)
        assert torch.equal(sum(rank[3] for rank in by_rank), sums)


def test_loss_and_gradients_are_those_of_torch() -> None:
    loss, grad_hidden, grad_weight, sums = run_ranks(1, run_loss, shares=True)[0]
    hidden, weight, labels, mask = drawn()
    wide = hidden.double().requires_grad_()
    rows = weight.double().requires_grad_()
    logits = F.linear(wide, rows[:SIZE])
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    masked = losses * mask.flatten()
    (0.37 * masked.sum()).backward()
    torch.testing.assert_close(loss, masked.sum().detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad_hidden.double(), wide.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad_weight, rows.grad, rtol=1e-5, atol=1e-6)
    is_odd = (labels % 2).flatten().bool()
    assert float(sums[0, 1]) == float(loss - sums[0, 0])
    assert float(sums[1, 1]) == float(mask.flatten()[is_odd].sum())
