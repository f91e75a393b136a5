"""Which experts are chosen, how their weights are made, and what the losses differentiate to."""

from dataclasses import replace

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.config.config import LoadBalancing, ModelConfig, MoEConfig, RouterScore
from nanotrain.model.context import LayerContext
from nanotrain.model.router import Router

E, K, S = 8, 2, 6
SOFTMAX = ModelConfig(hidden_size=E, moe=MoEConfig(num_experts=E, router_topk=K))
SIGMOID = replace(SOFTMAX, moe=replace(SOFTMAX.moe, router_score_function=RouterScore.sigmoid))


def route(model, logits, *, bias=None, scale=0.0):
    """A router whose weight is the identity, so that its input is its logits."""
    router = Router(model.moe, torch.nn.Parameter(torch.eye(E)), sequence=Group.single_rank("tp_cp"))
    if bias is not None:
        router.expert_bias.copy_(torch.tensor(bias))
    return router(logits, LayerContext(aux_loss_scale=scale), positions=torch.arange(logits.shape[1]))


def one_token(*logits):
    return torch.tensor([[logits]])


TOKEN = one_token(0.0, 3.0, 1.0, 2.0, -1.0, -2.0, 0.5, -3.0)


def test_softmax_over_the_chosen_or_before_the_routing():
    after, before = (
        route(SOFTMAX, TOKEN),
        route(replace(SOFTMAX, moe=replace(SOFTMAX.moe, router_pre_softmax=True)), TOKEN),
    )
    assert after.topk_ids.tolist() == before.topk_ids.tolist() == [[1, 3]]
    torch.testing.assert_close(after.topk_weights, torch.tensor([[3.0, 2.0]]).softmax(-1))
    torch.testing.assert_close(before.topk_weights, TOKEN[0].softmax(-1)[:, [1, 3]])


def test_sigmoid_scores_are_normalized_over_the_chosen_and_scaled():
    routing = route(replace(SIGMOID, moe=replace(SIGMOID.moe, router_topk_scaling_factor=2.5)), TOKEN)
    scores = torch.tensor([[3.0, 2.0]]).sigmoid()
    torch.testing.assert_close(routing.topk_weights, 2.5 * scores / scores.sum())
    one = route(replace(SIGMOID, moe=replace(SIGMOID.moe, router_topk=1)), TOKEN)
    torch.testing.assert_close(one.topk_weights, torch.tensor([[3.0]]).sigmoid())


def test_the_bias_moves_the_routing_and_never_the_weights():
    biased = replace(SIGMOID, moe=replace(SIGMOID.moe, router_enable_expert_bias=True))
    routing = route(biased, TOKEN, bias=[0.0, -1.0, 0, 0, 0, 0, 0, 0])
    assert routing.topk_ids.tolist() == [[3, 2]]
    scores = torch.tensor([[2.0, 1.0]]).sigmoid()
    torch.testing.assert_close(routing.topk_weights, scores / scores.sum())


def test_only_the_best_groups_are_chosen_from():
    # given groups of two: the best expert is in the first, the best two together are in the second
    model = replace(SOFTMAX, moe=replace(SOFTMAX.moe, router_num_groups=4, router_group_topk=1))
    token = one_token(2.0, -8.0, 1.8, 1.9, -1.0, -2.0, 0.5, -3.0)
    assert route(SOFTMAX, token).topk_ids.tolist() == [[0, 3]]
    assert route(model, token).topk_ids.tolist() == [[3, 2]]


def test_logits_are_fp32_whatever_the_activations_are():
    routing = route(SOFTMAX, TOKEN.bfloat16())
    assert routing.topk_weights.dtype == torch.float32


def batch_of_logits(seed=0):
    return torch.randn(3, S, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def gradient_of(model, logits, scale):
    """What flows back when nothing but the auxiliary losses has a gradient."""
    logits = logits.clone().requires_grad_()
    routing = route(model, logits, scale=scale)
    routing.topk_weights.backward(torch.zeros_like(routing.topk_weights))
    return logits.grad


@pytest.mark.parametrize("model", [SOFTMAX, SIGMOID])
def test_the_aux_loss_is_that_of_each_sequence_written_out(model):
    logits = batch_of_logits().requires_grad_()
    experts = route(model, logits.detach()).topk_ids.view(3, S, K)
    scores = logits.softmax(-1) if model is SOFTMAX else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    fractions = torch.nn.functional.one_hot(experts, E).sum(2).float().mean(1) * E / K
    loss = (fractions * scores.mean(1)).sum()  # over experts and sequences
    (expected,) = torch.autograd.grad(loss * 0.3 / 16, logits)
    found = gradient_of(replace(model, moe=replace(model.moe, aux_loss_coeff=0.3)), logits.detach(), 1 / 16)
    torch.testing.assert_close(found, expected)


def test_the_z_loss_is_a_mean_over_the_tokens_of_the_global_batch():
    logits = batch_of_logits().requires_grad_()
    (expected,) = torch.autograd.grad(logits.logsumexp(-1).square().sum() / (16 * S) * 0.3, logits)
    torch.testing.assert_close(
        gradient_of(replace(SOFTMAX, moe=replace(SOFTMAX.moe, z_loss_coeff=0.3)), logits.detach(), 1 / 16), expected
    )


def test_without_load_balancing_there_is_no_aux_loss():
    off = replace(SOFTMAX, moe=replace(SOFTMAX.moe, aux_loss_coeff=0.3, router_load_balancing_type=LoadBalancing.none))
    assert (gradient_of(off, batch_of_logits(), 1.0) == 0).all()
