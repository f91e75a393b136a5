"""Sinkhorn routing: factors of the experts with which every expert is chosen about equally often.

    cost[t, e] = exp(logit of token t for expert e)
    plan[t, e] = row[t] * cost[t, e] * column[e]; each token sums to 1 / L, each expert to 1 / E
    chosen     the K experts with the highest plan of the token, so with the highest
               logit + log(column): the factor of a token does not change the order of its experts

Row and column factors are computed in turns until column factors change by at most TOLERANCE on
average, and at most ITERATIONS times. Ranks that share a sequence gather its logits first, so all
of them compute the same bits, and the choice does not depend on the sharding.

Sources: Clark et al. 2022, "Unified Scaling Laws for Routed Language Models", S-BASE; tolerance of
Megatron-LM, `moe_utils.sinkhorn`, whose plan is over the tokens of a rank's microbatch.

    B batch   S tokens of a sequence on this rank   L all tokens of a sequence   E experts
"""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from nanotrain.comm.collectives import all_gather_into
from nanotrain.comm.group import Group
from nanotrain.model.context import LayerContext
from nanotrain.model.router import Router

TOLERANCE = 1e-4
EPSILON = 1e-8
ITERATIONS = 32  # a number, so that the host does not wait for the device


class SinkhornRouter(Router):
    """A router that balances the choice of experts in training by Sinkhorn's algorithm.

    Without gradients every token gets its best experts, as in `Router`.
    """

    def choose(
        self,
        logits: Tensor,
        scores: Tensor,
        *,
        context: LayerContext,
        positions: Callable[[], Tensor],
    ) -> Tensor:
        """[B, S, K] int64, the experts of the tokens."""
        if self.training and torch.is_grad_enabled():
            bias = sinkhorn_bias(logits, positions=positions(), sequence=self.sequence)
            logits = logits + bias
        return super().choose(logits, scores, context=context, positions=positions)


@torch.no_grad()
def sinkhorn_bias(logits: Tensor, *, positions: Tensor, sequence: Group) -> Tensor:
    """Biases of the logits by which experts are chosen.

    Args:
        logits: [B, S, E] fp32.
        positions: [S] int64, the positions of these tokens in their sequence.
        sequence: the ranks that hold the tokens of one sequence.

    Returns:
        [B, 1, E] fp64.
    """
    gathered = _gather_sequence(logits, positions, sequence=sequence)
    # a factor of a token is part of its row factor, so a softmax is an exponential without overflow
    cost = gathered.double().softmax(dim=-1)
    return column_factors(cost).log()


def column_factors(cost: Tensor) -> Tensor:
    """The factors of the experts; [B, L, E] positive fp64 -> [B, 1, E]."""
    batch, length, num_experts = cost.shape
    column = cost.new_ones(batch, 1, num_experts)
    is_done = torch.zeros(batch, 1, 1, dtype=torch.bool, device=cost.device)
    for _ in range(ITERATIONS):
        row = 1 / (length * ((column * cost).sum(dim=2, keepdim=True) + EPSILON))
        new = 1 / (num_experts * ((row * cost).sum(dim=1, keepdim=True) + EPSILON))
        change = (new - column).abs().mean(dim=2, keepdim=True)
        column = torch.where(is_done, column, new)
        is_done = is_done | (change <= TOLERANCE)
    return column


def _gather_sequence(logits: Tensor, positions: Tensor, *, sequence: Group) -> Tensor:
    """The logits of full sequences by position: [B, S, E] -> [B, L, E]."""
    columns = positions.to(torch.int32)[None, :, None].expand(len(logits), -1, 1)
    packed = torch.cat([logits.contiguous().view(torch.int32), columns], dim=-1)
    gathered = packed.new_empty((sequence.size, *packed.shape))
    all_gather_into(gathered, packed, group=sequence)
    unpacked = rearrange(gathered, "r b s c -> b (r s) c")
    order = unpacked[0, :, -1].argsort()
    ordered = unpacked[:, order, :-1]
    return ordered.contiguous().view(torch.float32)
