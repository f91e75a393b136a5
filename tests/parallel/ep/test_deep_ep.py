"""The dispatcher by DeepEP, over a stand-in that checks its arguments, equals the hierarchical one."""

import sys

import torch

from nanotrain.parallel.ep.deep_ep import DeepEPTokenDispatcher
from nanotrain.parallel.ep.dispatchers import build_token_dispatcher
from nanotrain.parallel.ep.token_dispatcher import DispatchOptions, LocalTokenDispatcher, Routing
from tests import fake_deep_ep
from tests.harness import run_ranks
from tests.parallel.ep.test_token_dispatcher import DROPS, E, H, K, T, outcome, times_expert


def both_outcomes(ctx):
    """Output and gradients by DeepEP and on one rank, and the calls of the library."""
    sys.modules["deep_ep"] = fake_deep_ep
    ep = ctx.group("ep")
    generator = torch.Generator().manual_seed(ctx.rank)
    num_tokens = T + ctx.rank
    x = torch.randn(num_tokens, H, generator=generator).bfloat16().requires_grad_()
    scores = torch.rand(num_tokens, E, generator=generator)
    experts = scores.topk(K, dim=-1).indices
    experts[::4, 0] = E  # dropped
    weights = torch.rand(num_tokens, K, generator=generator).requires_grad_()
    routing = Routing(experts, weights)
    grad = torch.randn(num_tokens, H, generator=generator).bfloat16()
    expected = outcome(
        LocalTokenDispatcher(E, may_drop=True), x, routing, grad, run_experts=times_expert(0, E)
    )
    options = DispatchOptions(may_drop=True, uses_deep_ep=True)
    dispatch = build_token_dispatcher(E, ep=ep, etp=ctx.group("etp"), options=options)
    assert isinstance(dispatch, DeepEPTokenDispatcher)
    size = E // ep.size
    mine = times_expert(ep.index * size, (ep.index + 1) * size)
    actual = outcome(
        dispatch,
        x,
        routing,
        grad,
        run_experts=lambda rows, offs: mine(rows, offs).to(rows.dtype),
    )
    # ranks are threads of one process
    (buffer,) = [each for each in fake_deep_ep.Buffer.built if each.group is ep.process_group]
    return expected, actual, buffer.calls


def test_outputs_and_gradients_are_those_of_one_rank_within_bf16():
    for expected, actual, calls in run_ranks(4, both_outcomes, ep=4):
        for wanted, value in zip(expected, actual, strict=True):
            torch.testing.assert_close(value.float(), wanted.float(), rtol=2e-2, atol=6e-2)
        # the gradient of the combine is sent as the tokens were, that of the dispatch is combined
        assert calls == ["dispatch", "wait", "combine", "dispatch again", "combine"]


def test_without_the_option_nothing_is_imported():
    assert not DROPS.uses_deep_ep
