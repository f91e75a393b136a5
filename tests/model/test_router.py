"""Which experts are chosen, how their weights are made, and what the losses differentiate to."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from nanotrain.config.layer_kinds import LoadBalancing
from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.model.context import LayerContext, ModelParallel
from nanotrain.model.moe import ROUTERS
from nanotrain.model.parameters import Parameters
from nanotrain.model.router import Router
from nanotrain.train.parts.router_balance import router_metrics
from tests.harness import run_ranks

E, K, S = 8, 2, 6
SOFTMAX = ModelConfig(hidden_size=E, moe=MoEConfig(num_experts=E, router_topk=K))
SIGMOID = replace(SOFTMAX, moe=replace(SOFTMAX.moe, router_score_function="sigmoid"))


def build_router(model, *, bias=None):
    """A router whose weight is the identity, so that its input is its logits."""
    weight = torch.nn.Parameter(torch.eye(E))
    params = Parameters({"router.weight": weight})
    router = ROUTERS[model.router_kind(0)](
        model, params, parallel=ModelParallel.single_rank(), layer=0
    )
    if bias is not None:
        router.expert_bias.copy_(torch.tensor(bias))
    return router


def route(model, logits, *, bias=None, context=None, router=None):
    router = router or build_router(model, bias=bias)
    return router(
        logits, context or LayerContext(), positions=lambda: torch.arange(logits.shape[1])
    )


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
    routing = route(
        replace(SIGMOID, moe=replace(SIGMOID.moe, router_topk_scaling_factor=2.5)), TOKEN
    )
    scores = torch.tensor([[3.0, 2.0]]).sigmoid()
    torch.testing.assert_close(routing.topk_weights, 2.5 * scores / scores.sum())
    padded = route(replace(SIGMOID, moe=replace(SIGMOID.moe, router_norm_epsilon=0.5)), TOKEN)
    torch.testing.assert_close(padded.topk_weights, scores / (scores.sum() + 0.5))
    one = route(replace(SIGMOID, moe=replace(SIGMOID.moe, router_topk=1)), TOKEN)
    torch.testing.assert_close(one.topk_weights, torch.tensor([[3.0]]).sigmoid())


def test_the_bias_moves_the_routing_and_never_the_weights():
    biased = replace(SIGMOID, moe=replace(SIGMOID.moe, router_enable_expert_bias=True))
    routing = route(biased, TOKEN, bias=[0.0, -1.0, 0.25, 0.5, 0, 0, 0, 0])
    assert routing.topk_ids.tolist() == [[3, 2]]
    scores = torch.tensor([[2.0, 1.0]]).sigmoid()
    torch.testing.assert_close(routing.topk_weights, scores / scores.sum())


def test_a_bias_is_added_to_softmax_scores_and_not_to_their_logits():
    biased = replace(SOFTMAX, moe=replace(SOFTMAX.moe, router_enable_expert_bias=True))
    # its logit of 1 would stay below 2
    routing = route(biased, TOKEN, bias=[0.0, 0.0, 0.5, 0.0, 0, 0, 0, 0])
    assert 2 in routing.topk_ids[0].tolist()
    chosen = TOKEN[0].gather(-1, routing.topk_ids)
    torch.testing.assert_close(routing.topk_weights, chosen.softmax(-1))


def test_only_the_best_groups_are_chosen_from():
    # given groups of two: the best expert is in the first, the best two together are in the second
    model = replace(SOFTMAX, moe=replace(SOFTMAX.moe, router_num_groups=4, router_group_topk=1))
    token = one_token(2.0, -8.0, 1.8, 1.9, -1.0, -2.0, 0.5, -3.0)
    assert route(SOFTMAX, token).topk_ids.tolist() == [[0, 3]]
    assert route(model, token).topk_ids.tolist() == [[3, 2]]


def test_the_bias_moves_the_choice_of_groups_too():
    # DeepSeek-V3 ranks groups by biased scores, so that the bias moves tokens between groups as
    # well
    moe = replace(
        SIGMOID.moe, router_num_groups=4, router_group_topk=1, router_enable_expert_bias=True
    )
    token = one_token(2.0, 2.0, 1.0, 1.0, -1.0, -2.0, 0.5, -3.0)
    assert sorted(route(replace(SIGMOID, moe=moe), token).topk_ids[0].tolist()) == [0, 1]
    biased = route(replace(SIGMOID, moe=moe), token, bias=[0.0, 0, 0.5, 0, 0, 0, 0, 0])
    assert biased.topk_ids.tolist() == [[2, 3]]


def test_groups_are_ranked_by_logits_unless_the_softmax_comes_first():
    # Megatron-LM's topk_routing_with_score_function: sums of 3 - 10 and 1 + 0.9, or of their
    # probabilities
    model = replace(SOFTMAX, moe=replace(SOFTMAX.moe, router_num_groups=4, router_group_topk=1))
    token = one_token(3.0, -10.0, 1.0, 0.9, -8.0, -8.0, -9.0, -9.0)
    assert route(model, token).topk_ids.tolist() == [[2, 3]]
    pre = replace(model, moe=replace(model.moe, router_pre_softmax=True))
    assert route(pre, token).topk_ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("is_pre", [False, True])
def test_experts_whose_probabilities_underflow_are_compared_by_their_logits(is_pre):
    model = replace(SOFTMAX, moe=replace(SOFTMAX.moe, router_pre_softmax=is_pre))
    token = one_token(-300.0, -250.0, -200.0, 0.0, -150.0, -400.0, -180.0, -190.0)
    assert (token.softmax(-1) > 0).sum() == 1
    assert route(model, token).topk_ids.tolist() == [[3, 4]]


def test_experts_in_turn_are_even_and_their_weights_are_learned():
    model = replace(SOFTMAX, moe=replace(SOFTMAX.moe, router_force_load_balancing=True))
    logits = batch_of_logits()[:, :4]
    routing = route(model, logits)
    assert routing.topk_ids.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]] * 3
    expected = logits.flatten(0, 1).gather(1, routing.topk_ids).softmax(-1)
    torch.testing.assert_close(routing.topk_weights, expected)


def test_logits_are_fp32_whatever_the_activations_are():
    routing = route(SOFTMAX, TOKEN.bfloat16())
    assert routing.topk_weights.dtype == torch.float32


def batch_of_logits(seed=0):
    return torch.randn(3, S, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def gradient_of(model, logits, scale, *, bias=None, router=None, context=None):
    """What flows back when nothing but the auxiliary losses has a gradient."""
    logits = logits.clone().requires_grad_()
    context = context or LayerContext(aux_loss_scale=scale)
    routing = route(model, logits, bias=bias, router=router, context=context)
    routing.topk_weights.backward(torch.zeros_like(routing.topk_weights))
    return logits.grad


@pytest.mark.parametrize("model", [SOFTMAX, SIGMOID])
def test_the_aux_loss_is_that_of_each_sequence_written_out(model):
    logits = batch_of_logits().requires_grad_()
    experts = route(model, logits.detach()).topk_ids.view(3, S, K)
    scores = (
        logits.softmax(-1)
        if model is SOFTMAX
        else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    )
    fractions = torch.nn.functional.one_hot(experts, E).sum(2).float().mean(1) * E / K
    loss = (fractions * scores.mean(1)).sum()  # over experts and sequences
    (expected,) = torch.autograd.grad(loss * 0.3 / 16, logits)
    actual = gradient_of(
        replace(model, moe=replace(model.moe, aux_loss_coeff=[0.3])), logits.detach(), 1 / 16
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("model", [SOFTMAX, SIGMOID])
def test_several_losses_are_each_that_of_its_scope_written_out(model):
    first, second = batch_of_logits(1), batch_of_logits(2)
    kinds = ["global_aux_loss", "seq_aux_loss", "aux_loss"]
    model = replace(
        model,
        moe=replace(model.moe, router_load_balancing_type=kinds, aux_loss_coeff=[0.3, 0.2, 0.1]),
    )
    router = build_router(model)

    def scores_and_choices(logits):
        scores = logits.softmax(-1)
        if model.moe.router_score_function == "sigmoid":
            scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        return scores, torch.nn.functional.one_hot(scores.topk(K, dim=-1).indices, E).sum(2).float()

    # choices: those of the tokens, or the mean of several microbatches
    def loss_of(scores, choices):
        return (choices.mean((0, 1)) * scores.mean((0, 1))).sum() * E / K

    _, choices_before = scores_and_choices(first)
    for logits, before in ((first, []), (second, [choices_before])):
        leaf = logits.clone().requires_grad_()
        scores, choices = scores_and_choices(leaf)
        expected = 0.3 * loss_of(scores, torch.cat([*before, choices])) + 0.1 * loss_of(
            scores, choices
        )
        expected = 3 * expected + 0.2 * sum(map(loss_of, scores.unsqueeze(1), choices.unsqueeze(1)))
        (gradient,) = torch.autograd.grad(expected / 16, leaf)
        torch.testing.assert_close(gradient_of(model, logits, 1 / 16, router=router), gradient)
    router.stats.reset()  # the next step starts anew
    assert router.stats.microbatch_tokens.sum() == 0


GLOBAL = replace(
    SOFTMAX,
    moe=replace(
        SOFTMAX.moe,
        router_load_balancing_type=["global_aux_loss"],
        aux_loss_coeff=[0.3],
        z_loss_coeff=0.1,
    ),
)


def gradients_with_padding(ctx):
    """Two microbatches of a sequence per rank, of which the second is padding on rank 1."""
    parallel = replace(ModelParallel.single_rank(), dp=ctx.group("dp"))
    params = Parameters({"router.weight": torch.nn.Parameter(torch.eye(E))})
    router = Router(GLOBAL, params, parallel=parallel, layer=0)
    gradients = []
    for sequence, is_padding in ((ctx.rank, False), (2 - 2 * ctx.rank, ctx.rank == 1)):
        context = LayerContext(aux_loss_scale=1.0, is_padding=is_padding)
        logits = batch_of_logits()[sequence : sequence + 1]
        gradients.append(gradient_of(GLOBAL, logits, 1.0, router=router, context=context))
    return gradients, router.stats.sums()


def test_padding_takes_part_in_the_loss_over_all_ranks_and_counts_nothing():
    router = build_router(GLOBAL)
    expected = [
        gradient_of(GLOBAL, logits, 1.0, router=router)
        for logits in batch_of_logits().split([2, 1])
    ]
    (first, first_sums), (second, second_sums) = run_ranks(2, gradients_with_padding)
    torch.testing.assert_close(torch.cat([first[0], second[0]]), expected[0])
    torch.testing.assert_close(first[1], expected[1])
    assert second[1].count_nonzero() == 0
    torch.testing.assert_close(first_sums + second_sums, router.stats.sums())


def test_a_recomputed_forward_compares_with_the_tokens_of_its_first_run():
    kinds = ["global_aux_loss"]
    model = replace(
        SOFTMAX, moe=replace(SOFTMAX.moe, router_load_balancing_type=kinds, aux_loss_coeff=[0.3])
    )
    router, context = build_router(model), LayerContext(aux_loss_scale=1.0)
    expected = gradient_of(model, batch_of_logits(1), 1.0, router=router, context=context)
    gradient_of(model, batch_of_logits(2), 1.0, router=router)
    again = gradient_of(model, batch_of_logits(1), 1.0, router=router, context=context)
    assert torch.equal(again, expected)
    assert router.stats.microbatch_tokens.sum() == 2 * batch_of_logits(1).shape[:2].numel() * K


def test_the_aux_loss_counts_the_best_scores_whatever_bias_and_groups_choose():
    # DeepSeek-V3, equation 18, and Megatron-LM's compute_routing_scores_for_aux_loss
    model = replace(
        SIGMOID,
        moe=replace(
            SIGMOID.moe,
            router_enable_expert_bias=True,
            router_num_groups=4,
            router_group_topk=2,
            aux_loss_coeff=[0.3],
        ),
    )
    bias = [0.0, -5.0, 3.0, 0.0, 1.0, 0.0, -2.0, 0.5]
    logits = batch_of_logits().requires_grad_()
    scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    best = scores.topk(K, dim=-1).indices
    assert not torch.equal(best, route(model, logits.detach(), bias=bias).topk_ids.view(3, S, K))
    fractions = torch.nn.functional.one_hot(best, E).sum(2).float().mean(1) * E / K
    (expected,) = torch.autograd.grad((fractions * scores.mean(1)).sum() * 0.3 / 16, logits)
    torch.testing.assert_close(gradient_of(model, logits.detach(), 1 / 16, bias=bias), expected)


def test_the_aux_loss_counts_the_best_scores_where_experts_are_taken_in_turn():
    in_turn, free = (
        replace(
            SOFTMAX,
            moe=replace(SOFTMAX.moe, aux_loss_coeff=[0.3], router_force_load_balancing=forced),
        )
        for forced in (True, False)
    )
    assert torch.equal(*(gradient_of(model, batch_of_logits(), 1.0) for model in (in_turn, free)))


def test_the_z_loss_is_a_mean_over_the_tokens_of_the_global_batch():
    logits = batch_of_logits().requires_grad_()
    (expected,) = torch.autograd.grad(logits.logsumexp(-1).square().sum() / (16 * S) * 0.3, logits)
    torch.testing.assert_close(
        gradient_of(
            replace(SOFTMAX, moe=replace(SOFTMAX.moe, z_loss_coeff=0.3)), logits.detach(), 1 / 16
        ),
        expected,
    )


WITHOUT_LOSS = {"none", "quantile_balancing", "sinkhorn"}


@pytest.mark.parametrize("kind", sorted(WITHOUT_LOSS))
def test_without_load_balancing_there_is_no_aux_loss(kind):
    off = replace(
        SOFTMAX, moe=replace(SOFTMAX.moe, aux_loss_coeff=[0.3], router_load_balancing_type=[kind])
    )
    assert (gradient_of(off, batch_of_logits(), 1.0) == 0).all()


@pytest.mark.parametrize("kind", sorted({*get_args(LoadBalancing)} - WITHOUT_LOSS))
def test_the_metrics_of_the_losses_are_means_and_one_is_perfect_balance(kind):
    moe = replace(
        SOFTMAX.moe, aux_loss_coeff=[0.3], z_loss_coeff=0.3, router_load_balancing_type=[kind]
    )
    router = build_router(replace(SOFTMAX, moe=moe))
    for batch_size in (2, 3):  # equal probabilities
        route(SOFTMAX, torch.zeros(batch_size, S, E, requires_grad=True), router=router)
    metrics = router_metrics(router.stats.sums().tolist())
    assert metrics["balance_loss"] == pytest.approx(1.0)
    assert metrics["z_loss"] == pytest.approx(math.log(E) ** 2)


def test_the_metric_is_that_of_the_first_loss_alone():
    kinds = ["seq_aux_loss", "aux_loss"]
    moe = replace(SOFTMAX.moe, aux_loss_coeff=[0.3, 0.2], router_load_balancing_type=kinds)
    router = build_router(replace(SOFTMAX, moe=moe))
    route(SOFTMAX, torch.zeros(2, S, E, requires_grad=True), router=router)
    assert router_metrics(router.stats.sums().tolist())["balance_loss"] == pytest.approx(1.0)
