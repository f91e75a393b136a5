"""An expert keeps the tokens of a sequence that weigh it highest, and no more than its capacity."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.comm.group import Group
from nanotrain.config.model import MoEConfig
from nanotrain.model.router import drop_over_capacity, expert_capacity
from nanotrain.parallel.ep.token_dispatcher import Routing

E = 4


def kept_by_hand(experts, weights, capacity):
    """Token by token: the rule written out."""
    kept = experts.clone()
    for sequence, chosen in enumerate(experts.tolist()):
        for expert in range(E):
            bids = [
                (-weights[sequence, token, slot].item(), token, slot)
                for token, row in enumerate(chosen)
                for slot, other in enumerate(row)
                if other == expert
            ]
            for _, token, slot in sorted(bids)[capacity:]:
                kept[sequence, token, slot] = E
    return kept


def test_a_capacity_is_rounded_up_as_in_megatron_lm():
    moe = MoEConfig(num_experts=4, router_topk=1, expert_capacity_factor=1.0)
    assert [expert_capacity(moe, length) for length in (1, 4, 10)] == [1, 1, 3]


@given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 10**6))
def test_the_highest_weights_stay_and_ties_go_by_position(length, capacity, seed):
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(2, length, E, generator=generator).topk(2, dim=-1).indices
    weights = torch.randint(0, 3, (2, length, 2), generator=generator) / 2  # many ties
    actual = drop_over_capacity(
        Routing(experts, weights),
        num_experts=E,
        capacity=min(capacity, length),
        positions=torch.arange(length),
        sequence=Group.single_rank("tp_cp"),
    )
    assert torch.equal(actual, kept_by_hand(experts, weights, capacity))


@given(st.permutations(range(6)))
def test_the_order_of_the_tokens_of_a_rank_does_not_matter(order):
    generator = torch.Generator().manual_seed(1)
    experts = torch.rand(1, 6, E, generator=generator).topk(2, dim=-1).indices
    weights = torch.randint(0, 2, (1, 6, 2), generator=generator).float()
    options = {"num_experts": E, "capacity": 2, "sequence": Group.single_rank("tp_cp")}
    straight = drop_over_capacity(Routing(experts, weights), positions=torch.arange(6), **options)
    positions = torch.tensor(order)
    mixed = drop_over_capacity(
        Routing(experts[:, positions], weights[:, positions]), positions=positions, **options
    )
    assert torch.equal(mixed, straight[:, positions])


def test_every_sequence_has_a_capacity_of_its_own():
    """Over the microbatch of 8 tokens, as Megatron-LM counts, a capacity of 4 would drop the second
    sequence.
    """
    experts = torch.zeros(2, 4, 1, dtype=torch.int64)
    weights = torch.tensor([[0.9, 0.8, 0.7, 0.6], [0.4, 0.1, 0.3, 0.2]])[..., None]
    actual = drop_over_capacity(
        Routing(experts, weights),
        num_experts=E,
        capacity=2,
        positions=torch.arange(4),
        sequence=Group.single_rank("tp_cp"),
    )
    assert actual[..., 0].tolist() == [[0, 0, E, E], [0, E, 0, E]]
