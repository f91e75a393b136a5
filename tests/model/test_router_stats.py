"""Statistics are summed over all ranks, once per step, and the expert bias moves against the imbalance."""

import pytest
import torch
from torch import nn

from nanotrain.model.router_stats import RouterMetrics, RouterStats, collect_router_sums, routers_of, update_expert_bias
from tests.harness import ranks

E = 4


class ToyRouter(nn.Module):
    def __init__(self, *, has_bias: bool = True) -> None:
        super().__init__()
        self.stats = RouterStats(E)
        self.expert_bias = torch.zeros(E) if has_bias else None


def stage_of(*routers):
    stage = nn.Module()
    stage.layers = nn.ModuleDict({str(i): nn.ModuleDict({"router": router}) for i, router in enumerate(routers)})
    return stage


def count(router, experts, *, kept=None):
    experts = torch.tensor(experts)
    probabilities = torch.full((*experts.shape[:-1], E), 1 / E)
    router.stats.count(experts, kept_ids=experts if kept is None else torch.tensor(kept), probabilities=probabilities)


def metrics_of(sums):
    return {name: RouterMetrics.of(values.tolist()) for name, values in sums.items()}


def test_metrics_are_ratios_of_what_was_counted():
    router = ToyRouter()
    count(router, [[[0, 1], [0, 2]]], kept=[[[0, 1], [E, 2]]])
    count(router, [[[0, 1], [0, 2]]])
    router.stats.aux_loss += torch.tensor(6.0)
    router.stats.z_loss += torch.tensor(2.0)
    (router_metrics,) = metrics_of(collect_router_sums(routers_of(stage_of(router)), [])).values()
    assert router_metrics.tokens_per_expert == (4, 2, 2, 0)
    assert router_metrics.max_over_mean == 2.0
    assert router_metrics.dropped_fraction == 1 / 8
    assert router_metrics.entropy == pytest.approx(torch.tensor(4.0).log().item())
    assert (router_metrics.aux_loss, router_metrics.z_loss) == (1.5, 0.5)


@ranks(4, tp=2)
def test_all_ranks_are_counted_in_one_collective_per_group(ctx):
    routers = routers_of(stage_of(ToyRouter(), ToyRouter(has_bias=False)))
    first, second = routers.values()
    count(first, [[[ctx.rank, 0]]])
    count(second, [[[3, 2]]])
    sums = collect_router_sums(routers, [ctx.group("tp"), ctx.group("dp_cp")])
    metrics = metrics_of(sums)
    assert list(metrics) == ["layers.0.router", "layers.1.router"]
    assert [router_metrics.tokens_per_expert for router_metrics in metrics.values()] == [(5, 1, 1, 1), (0, 0, 4, 4)]
    assert ctx.traffic.calls() == 2
    update_expert_bias(routers, sums, rate=0.5)
    assert first.expert_bias.tolist() == [-0.5, 0.5, 0.5, 0.5]
    count(first, [[[1, 1]]])
    (router_metrics, _) = metrics_of(collect_router_sums(routers, [ctx.group("tp"), ctx.group("dp_cp")])).values()
    assert router_metrics.tokens_per_expert == (0, 8, 0, 0), "every step counts anew"


def test_a_stage_without_routers_has_no_metrics():
    assert collect_router_sums(routers_of(stage_of()), []) == {}


def test_an_even_distribution_leaves_the_bias_alone():
    router = ToyRouter()
    count(router, [[[0, 1], [2, 3]]])
    routers = routers_of(stage_of(router))
    update_expert_bias(routers, collect_router_sums(routers, []), rate=0.5)
    assert router.expert_bias.tolist() == [0.0] * E
