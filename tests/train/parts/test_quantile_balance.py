"""Quantile balancing over a step: what is blended, and a skipped step."""

import math

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.model.router import Router
from nanotrain.model.router_quantiles import quantile_bias
from nanotrain.model.router_stats import routers_of
from nanotrain.optim.distributed import Update
from nanotrain.train.parts.quantile_balance import QuantileBalance
from tests.harness import run_ranks
from tests.laws.test_quantile_balancing import QUANTILES, case_of
from tests.laws.worlds import build_here


def update_of(skipped: bool) -> Update:
    zero = torch.zeros((), dtype=torch.float64)
    return Update(zero, torch.tensor(skipped), torch.zeros(0), 1.0, torch.tensor(True))


def blend(ctx: ParallelContext) -> None:
    run = build_here(ctx, case_of(None))
    part = QuantileBalance(run)
    routers = [router for stage in run.stages.values() for router in routers_of(stage).values()]
    router = routers[0]
    assert isinstance(router, Router)
    assert router.expert_bias is not None and router.required_bias is not None
    before = torch.tensor([0.1, -0.1, 0.05, -0.05])
    for skipped in (True, False):
        router.expert_bias.copy_(before)
        router.required_bias.count(torch.rand(1, 40, 4), router.expert_bias)
        counts = router.required_bias.counts.clone()
        part.after_update(update_of(skipped), torch.zeros(0), is_logged=True)
        target = quantile_bias(counts, before, fraction=0.5)
        ema = QUANTILES["moe_router_quantile_balancing_ema"]
        blended = (ema * before.double() + (1 - ema) * target).float()
        assert router.expert_bias.equal(before if skipped else blended)
        assert not router.required_bias.counts.any(), "counted anew in the next step"
    assert not math.isclose(blended[0].item(), before[0].item(), abs_tol=1e-3)


def test_a_step_blends_its_quantile_and_a_skipped_one_does_not() -> None:
    run_ranks(1, blend, shares=True)


def recount(ctx: ParallelContext) -> tuple[int, list[float]]:
    """Tokens that a step counts where blocks are recomputed, and the bias."""
    memory = {"recompute_granularity": "full", "recompute_method": "uniform"}
    run = build_here(ctx, case_of(None).but(memory=memory))
    part = next(iter(run.stages.values()))
    routers = list(routers_of(part).values())
    router = routers[0]
    assert isinstance(router, Router) and router.required_bias is not None
    counted = []
    original = router.required_bias.count

    def count(scores: torch.Tensor, bias: torch.Tensor) -> None:
        counted.append(scores.shape[:2].numel())
        original(scores, bias)

    router.required_bias.count = count  # type: ignore[method-assign]
    from nanotrain.train.step import train_step

    batch = run.batch_iterator.next()
    assert batch is not None
    train_step(run, batch)
    assert router.expert_bias is not None
    return sum(counted), router.expert_bias.tolist()


def test_recomputed_tokens_count_once() -> None:
    ((tokens, bias),) = run_ranks(1, recount, shares=True)
    assert tokens == 12 * 24
    assert bias == pytest.approx(bias) and any(bias)
