"""Experts that take only so many tokens of a sequence: who stays and who is dropped.

Of the tokens of one sequence that choose an expert, those that give it the highest weight stay; equal weights go by
place in the sequence. That is a rule on whole sequences, so ranks that share one first tell each other their choices,
and the answer is the same however the tokens are spread.

    B batch   S tokens of a sequence on this rank   L all tokens of a sequence   E experts   K experts per token
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_gather_into
from nanotrain.comm.group import Group
from nanotrain.config.config import ModelConfig
from nanotrain.parallel.ep.token_dispatcher import Routing


def capacity_of(model_config: ModelConfig, length: int) -> int:
    """Tokens of a sequence that an expert takes: its even share times the factor, rounded up.

    >>> from nanotrain.config.config import MoEConfig
    >>> capacity_of(ModelConfig(moe=MoEConfig(num_experts=8, router_topk=2, expert_capacity_factor=1.25)), 64)
    20
    """
    moe = model_config.moe
    assert moe.num_experts is not None and moe.expert_capacity_factor is not None
    return min(length, math.ceil(moe.expert_capacity_factor * length * moe.router_topk / moe.num_experts))


def within_capacity(routing: Routing, *, num_experts: int, capacity: int, places: Tensor, sequence: Group) -> Tensor:
    """Drop what is beyond the experts' capacity.

    Args:
        routing: [B, S, K] experts and weights.
        num_experts: E.
        capacity: tokens of a sequence that an expert takes.
        places: [S] int64, where this rank's tokens stand in their sequence.
        sequence: the ranks that hold the tokens of one sequence.

    Returns:
        [B, S, K] int64: the experts, E in place of dropped choices.
    """
    whole = _of_all_ranks(routing, places, sequence=sequence)
    batch, length, _ = whole.experts.shape
    # By expert: the weight of every token of the sequence in order, -1 where it chose others.
    given = whole.weights.new_full((batch, length, num_experts), -1.0)
    rows = whole.places[:, None].expand_as(whole.experts[0])
    given[torch.arange(batch, device=rows.device)[:, None, None], rows, whole.experts] = whole.weights
    best = given.argsort(dim=1, descending=True, stable=True)[:, :capacity]
    stays = torch.zeros_like(given, dtype=torch.bool).scatter_(1, best, True)
    return routing.topk_ids.masked_fill(~stays[:, places].gather(2, routing.topk_ids), num_experts)


@dataclass(frozen=True)
class _Whole:
    """The choices of whole sequences: [B, L, K] experts and weights, [L] places, in any order."""

    experts: Tensor
    weights: Tensor
    places: Tensor


def _of_all_ranks(routing: Routing, places: Tensor, *, sequence: Group) -> _Whole:
    """Every rank's choices, in one collective: numbers of experts and places travel beside the weights' bits."""
    own = places.to(torch.int32)[None, :, None].expand(*routing.topk_ids.shape[:2], 1)
    weight_bits = routing.topk_weights.contiguous().view(torch.int32)
    packed = torch.cat([routing.topk_ids.to(torch.int32), weight_bits, own], dim=-1)
    everyone = packed.new_empty((sequence.size, *packed.shape))
    all_gather_into(everyone, packed, group=sequence)
    topk = routing.topk_ids.shape[-1]
    experts, weights, where = everyone.movedim(0, 1).flatten(1, 2).split([topk, topk, 1], dim=-1)
    return _Whole(experts.long(), weights.contiguous().view(torch.float32), where[0, :, 0].long())
