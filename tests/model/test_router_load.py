"""Loads are counted over all ranks, once per step, and the bias moves against them."""

import pytest
import torch
from torch import nn

from nanotrain.model.router_load import RouterTally, collect_router_loads, routers_of, update_expert_bias
from tests.harness import ranks

E = 4


class ToyRouter(nn.Module):
    def __init__(self, *, has_bias: bool = True) -> None:
        super().__init__()
        self.tally = RouterTally(E)
        self.expert_bias = torch.zeros(E) if has_bias else None


def stage_of(*routers):
    stage = nn.Module()
    stage.layers = nn.ModuleDict({str(i): nn.ModuleDict({"router": router}) for i, router in enumerate(routers)})
    return stage


def count(router, experts, *, kept=None):
    experts = torch.tensor(experts)
    probabilities = torch.full((*experts.shape[:-1], E), 1 / E)
    router.tally.add(experts, kept=experts if kept is None else torch.tensor(kept), probabilities=probabilities)


def test_a_load_says_what_was_chosen_dropped_and_lost():
    router = ToyRouter()
    count(router, [[[0, 1], [0, 2]]], kept=[[[0, 1], [E, 2]]])
    count(router, [[[0, 1], [0, 2]]])
    router.tally.add_balance_loss(torch.tensor(6.0))
    router.tally.add_z_loss(torch.tensor(2.0))
    (load,) = collect_router_loads(stage_of(router), []).values()
    assert load.choices == (4, 2, 2, 0)
    assert load.max_load == 2.0
    assert load.dropped_fraction == 1 / 8
    assert load.entropy == pytest.approx(torch.tensor(4.0).log().item())
    assert (load.balance_loss, load.z_loss) == (1.5, 0.5)


@ranks(4, tp=2)
def test_all_ranks_are_counted_in_one_collective_per_group(ctx):
    stage = stage_of(ToyRouter(), ToyRouter(has_bias=False))
    first, second = routers_of(stage).values()
    count(first, [[[ctx.rank, 0]]])
    count(second, [[[3, 2]]])
    loads = collect_router_loads(stage, [ctx.group("tp"), ctx.group("dp_cp")])
    assert list(loads) == ["layers.0.router", "layers.1.router"]
    assert [load.choices for load in loads.values()] == [(5, 1, 1, 1), (0, 0, 4, 4)]
    assert ctx.traffic.calls() == 2
    update_expert_bias(stage, loads, rate=0.5)
    assert first.expert_bias.tolist() == [-0.5, 0.5, 0.5, 0.5]
    count(first, [[[1, 1]]])
    (load, _) = collect_router_loads(stage, [ctx.group("tp"), ctx.group("dp_cp")]).values()
    assert load.choices == (0, 8, 0, 0), "every step counts anew"


def test_a_stage_without_routers_has_no_loads():
    assert collect_router_loads(stage_of(), []) == {}


def test_an_even_load_leaves_the_bias_alone():
    router = ToyRouter()
    count(router, [[[0, 1], [2, 3]]])
    stage = stage_of(router)
    update_expert_bias(stage, collect_router_loads(stage, []), rate=0.5)
    assert router.expert_bias.tolist() == [0.0] * E
