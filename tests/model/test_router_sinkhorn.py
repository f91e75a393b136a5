"""Sinkhorn routing: against the loop of Megatron-LM's formula, per sequence, whatever the sharding."""

from dataclasses import replace

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.model.router_sinkhorn import ITERATIONS, TOLERANCE, column_factors, sinkhorn_bias
from tests.harness import run_ranks
from tests.model.test_router import SIGMOID, E, route

ONE_RANK = Group.single_rank("tp_cp")
B, L, K = 3, 24, 2


def logits_of(scale: float, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    favourite = torch.linspace(scale, 0.0, E)
    return favourite + scale * torch.randn(B, L, E, generator=generator)


def plan_by_hand(logits: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The plan of one sequence [L, E], and the number of iterations."""
    cost = logits.double().exp()
    column = torch.ones(len(cost[0]), dtype=cost.dtype)
    error = torch.tensor(1.0)
    iteration = 0
    while error > TOLERANCE:
        iteration += 1
        row = 1 / len(cost) / (cost @ column + 1e-8)
        new = 1 / len(column) / (row @ cost + 1e-8)
        error = (new - column).abs().mean()
        column = new
    return row[:, None] * cost * column, iteration


def bias_of(logits: torch.Tensor) -> torch.Tensor:
    return sinkhorn_bias(logits, positions=torch.arange(logits.shape[1]), sequence=ONE_RANK)


@pytest.mark.parametrize("scale", [0.1, 1.0, 2.0])
def test_the_choice_is_that_of_the_formula(scale):
    logits = logits_of(scale)
    chosen = (logits + bias_of(logits)).topk(K, dim=-1).indices
    for sequence, ids in zip(logits, chosen, strict=True):
        plan, iterations = plan_by_hand(sequence)
        assert iterations <= ITERATIONS
        assert torch.equal(ids, plan.topk(K, dim=-1).indices)


def test_experts_are_chosen_about_equally_often():
    logits = logits_of(2.0)
    counts = [
        torch.stack([ids.eq(e).sum() for e in range(E)]).float().std()
        for ids in (logits.argmax(-1), (logits + bias_of(logits)).argmax(-1))
    ]
    assert counts[1] < counts[0] / 2


def test_every_sequence_is_balanced_by_itself():
    logits = logits_of(2.0)
    one_by_one = torch.cat([bias_of(sequence[None]) for sequence in logits])
    assert torch.equal(bias_of(logits), one_by_one)
    assert not torch.allclose(one_by_one[0], one_by_one[1])


def test_an_expert_that_no_token_can_choose_gives_finite_factors():
    cost = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]], dtype=torch.float64)
    assert column_factors(cost).isfinite().all()


def test_one_expert_per_token_is_weighted_by_its_sigmoid():
    moe = replace(SIGMOID.moe, router_topk=1, router_load_balancing_type=["sinkhorn"])
    model = replace(SIGMOID, moe=moe)
    logits = logits_of(2.0)
    routing = route(model, logits)
    expected = (logits + bias_of(logits)).argmax(-1).flatten()
    assert torch.equal(routing.topk_ids.flatten(), expected)
    weights = logits.flatten(0, 1).gather(1, expected[:, None]).sigmoid()
    torch.testing.assert_close(routing.topk_weights, weights)
    with torch.no_grad():  # validation and generation take the best experts
        evaluated = route(model, logits)
    assert torch.equal(evaluated.topk_ids.flatten(), logits.argmax(-1).flatten())


def bias_of_rank(ctx: ParallelContext, logits: torch.Tensor) -> torch.Tensor:
    group = ctx.group("cp")
    # rank r has every second position, in falling order
    positions = torch.arange(group.index, L, group.size).flip(0)
    return sinkhorn_bias(logits[:, positions], positions=positions, sequence=group)


def test_ranks_that_share_a_sequence_have_the_bits_of_one_rank():
    logits = logits_of(1.0)
    for bias in run_ranks(2, bias_of_rank, logits, cp=2, shares=True):
        assert torch.equal(bias, bias_of(logits))
