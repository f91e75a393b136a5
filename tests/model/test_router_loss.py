"""Losses of a router against their formulas, and how they join the backward pass."""

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.model.router import attach_loss, balance_loss, count_tokens, z_loss
from tests.harness import ranks

SEQUENCE = Group.single_rank("tp_cp")


def written_out(probabilities: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3 (2024), equations 17-20, sequence by sequence."""
    total = torch.zeros((), dtype=probabilities.dtype)
    _, length, num_experts = probabilities.shape
    for scores, ids in zip(probabilities, topk_ids, strict=True):
        for expert in range(num_experts):
            fraction = (ids == expert).sum() * num_experts / (ids.shape[-1] * length)
            total = total + fraction * scores[:, expert].mean()
    return total


def seq_aux_loss(
    probabilities: torch.Tensor, topk_ids: torch.Tensor, *, sequence: Group
) -> torch.Tensor:
    tokens = count_tokens(topk_ids, num_experts=probabilities.shape[-1], sequence=sequence)
    length = probabilities.shape[1] * sequence.size
    return balance_loss(probabilities, tokens, topk=topk_ids.shape[-1], num_tokens=length)


def random_routing() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    probabilities = torch.rand(3, 8, 5).softmax(dim=-1)
    return probabilities, torch.rand(3, 8, 5).topk(2, dim=-1).indices


def test_the_auxiliary_loss_is_the_formula() -> None:
    probabilities, topk_ids = random_routing()
    torch.testing.assert_close(
        seq_aux_loss(probabilities, topk_ids, sequence=SEQUENCE),
        written_out(probabilities, topk_ids),
    )


def test_perfect_balance_is_one_per_sequence() -> None:
    probabilities, topk_ids = (
        torch.full((2, 4, 4), 0.25),
        torch.arange(4).repeat(2, 2).view(2, 4, 2),
    )
    assert seq_aux_loss(probabilities, topk_ids, sequence=SEQUENCE).item() == pytest.approx(2.0)


@ranks(2, threads=False, cp=2)
def test_the_shares_of_a_sequence_sum_to_its_loss(ctx) -> None:
    probabilities, topk_ids = random_routing()
    group = ctx.group("tp_cp")
    local = slice(group.index * 4, (group.index + 1) * 4)
    share = seq_aux_loss(probabilities[:, local], topk_ids[:, local], sequence=group)
    torch.distributed.all_reduce(share)
    torch.testing.assert_close(share, written_out(probabilities, topk_ids))


def test_the_z_loss_is_the_squared_log_sum_exp() -> None:
    logits = torch.randn(2, 3, 4)
    torch.testing.assert_close(z_loss(logits), torch.log(logits.exp().sum(-1)).square().sum())


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5)])
def test_a_joined_loss_is_differentiated_with_its_scale_alone(scale: float | torch.Tensor) -> None:
    x, weight = torch.randn(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    joined = attach_loss(x, weight.square(), scale=scale)
    assert torch.equal(joined, x)
    (joined.sum() * 7).backward()
    assert torch.equal(x.grad, torch.full((3,), 7.0)) and weight.grad.item() == 2.0
