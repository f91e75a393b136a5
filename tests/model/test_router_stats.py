"""What a router counts, the metrics that follow from it, and how the expert bias moves against the
imbalance.
"""

import pytest
import torch
from torch import nn

from nanotrain.model.router_stats import RouterStats, routers_of
from nanotrain.train.parts.router_balance import router_metrics, update_expert_bias

E = 4


class ToyRouter(nn.Module):
    def __init__(self, *, has_bias: bool = True) -> None:
        super().__init__()
        self.stats = RouterStats(E)
        self.expert_bias = torch.zeros(E) if has_bias else None


def count(router, experts, *, kept=None):
    experts = torch.tensor(experts)
    probabilities = torch.full((*experts.shape[:-1], E), 1 / E)
    num_dropped = None if kept is None else (torch.tensor(kept) == E).sum()
    router.stats.count(
        experts.flatten().bincount(minlength=E),
        num_dropped=num_dropped,
        probabilities=probabilities,
    )


def test_metrics_are_ratios_of_what_was_counted():
    router = ToyRouter()
    count(router, [[[0, 1], [0, 2]]], kept=[[[0, 1], [E, 2]]])
    count(router, [[[0, 1], [0, 2]]])
    router.stats.aux_loss += torch.tensor(6.0)
    router.stats.z_loss += torch.tensor(2.0)
    metrics = router_metrics(router.stats.sums().tolist())
    assert metrics.pop("entropy") == pytest.approx(torch.tensor(4.0).log().item())
    assert metrics == {
        "load": [4, 2, 2, 0],
        "max_load": 2.0,
        "dropped": 1 / 8,
        "balance_loss": 1.5,
        "z_loss": 0.5,
    }


def test_routers_are_found_by_name_and_count_anew_after_a_reset():
    stage = nn.Module()
    stage.layers = nn.ModuleDict({str(i): nn.ModuleDict({"router": ToyRouter()}) for i in range(2)})
    routers = routers_of(stage)
    assert list(routers) == ["layers.0.router", "layers.1.router"] and routers_of(nn.Module()) == {}
    first = routers["layers.0.router"]
    count(first, [[[3, 0]]])
    first.stats.reset()
    count(first, [[[1, 1]]])
    assert router_metrics(first.stats.sums().tolist())["load"] == [0, 2, 0, 0]


@pytest.mark.parametrize(
    ("tokens", "bias"), [([5, 1, 1, 1], [-0.5, 0.5, 0.5, 0.5]), ([2, 2, 2, 2], [0.0] * E)]
)
def test_the_bias_moves_by_the_rate_and_an_even_load_leaves_it_alone(tokens, bias):
    router = ToyRouter()
    update_expert_bias(router, torch.tensor(tokens, dtype=torch.float64), rate=0.5)
    assert router.expert_bias.tolist() == bias
    update_expert_bias(ToyRouter(has_bias=False), torch.tensor([1.0]), rate=0.5)
