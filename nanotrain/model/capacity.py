"""Expert capacity: the most tokens of a sequence that an expert takes; pairs beyond it are dropped.

An expert keeps the tokens of a sequence with the highest weights for it; ties go to the earlier position. The rule is
for full sequences: ranks that share one gather its routing first, so the result does not depend on the sharding.

    B batch   S tokens of a sequence on this rank   L all tokens of a sequence   E experts   K experts per token
"""

import math

import torch
from einops import rearrange
from torch import Tensor

from nanotrain.comm.collectives import all_gather_into
from nanotrain.comm.group import Group
from nanotrain.config.config import MoEConfig
from nanotrain.parallel.ep.token_dispatcher import Routing


def expert_capacity(moe: MoEConfig, length: int) -> int:
    """Tokens of a sequence that an expert takes: an even share times the capacity factor, rounded up.

    >>> expert_capacity(MoEConfig(num_experts=8, router_topk=2, expert_capacity_factor=1.25), 64)
    20
    """
    assert moe.num_experts is not None and moe.expert_capacity_factor is not None
    return min(length, math.ceil(moe.expert_capacity_factor * length * moe.router_topk / moe.num_experts))


def drop_over_capacity(
    routing: Routing, *, num_experts: int, capacity: int, positions: Tensor, sequence: Group
) -> Tensor:
    """Mark the pairs beyond the capacity of their expert.

    Args:
        routing: topk_ids and topk_weights, [B, S, K].
        num_experts: E.
        capacity: tokens of a sequence that an expert takes.
        positions: [S] int64, of this rank's tokens in their sequence.
        sequence: the ranks that hold the tokens of one sequence.

    Returns:
        [B, S, K] int64: the experts, with E for dropped pairs.
    """
    gathered, gathered_positions = _gather_sequence(routing, positions, sequence=sequence)
    batch, length, _ = gathered.topk_ids.shape
    # The weight of every token for every expert, by position; -1 where the token does not choose the expert.
    weights = gathered.topk_weights.new_full((batch, length, num_experts), -1.0)
    rows = gathered_positions[:, None].expand_as(gathered.topk_ids[0])
    weights[torch.arange(batch, device=rows.device)[:, None, None], rows, gathered.topk_ids] = gathered.topk_weights
    best = weights.argsort(dim=1, descending=True, stable=True)[:, :capacity]
    is_kept = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, best, True)
    return routing.topk_ids.masked_fill(~is_kept[:, positions].gather(2, routing.topk_ids), num_experts)


def _gather_sequence(routing: Routing, positions: Tensor, *, sequence: Group) -> tuple[Routing, Tensor]:
    """The routing of full sequences [B, L, K] and their positions [L], in any order.

    One collective: ids and positions are packed beside the bits of the weights.
    """
    batch, _, topk = routing.topk_ids.shape
    columns = positions.to(torch.int32)[None, :, None].expand(batch, -1, 1)
    weight_bits = routing.topk_weights.contiguous().view(torch.int32)
    packed = torch.cat([routing.topk_ids.to(torch.int32), weight_bits, columns], dim=-1)
    gathered = packed.new_empty((sequence.size, *packed.shape))
    all_gather_into(gathered, packed, group=sequence)
    ids, weights, columns = rearrange(gathered, "r b s c -> b (r s) c").split([topk, topk, 1], dim=-1)
    return Routing(ids.long(), weights.contiguous().view(torch.float32)), columns[0, :, 0].long()
