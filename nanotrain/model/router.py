"""The router: the experts of each token, and the weight of each expert's output.

    logits        [E] per token, fp32 for every dtype of activations
    scores        softmax, sigmoid or sqrt(softplus) of the logits (SCORES)
    topk_ids      the K experts with the highest score + bias, within the best groups if there are
                  groups. Softmax scores without pre-softmax and bias are compared by their logits,
                  as in Megatron-LM
    topk_weights  factors of the expert outputs; never changed by the bias
    losses        balance_loss and z_loss, attached to the weights (MoEAuxLossAutoScaler of
                  Megatron-LM)
    capacity      (token, expert) pairs beyond the capacity of the expert are dropped
    stats         counts for the metrics and for the bias (router_stats.py)

**Balance.** A loss is over the T tokens of a sequence (seq_aux_loss), of a microbatch (aux_loss),
or of a microbatch on all ranks with the mean tokens_per_expert of the microbatches so far
(global_aux_loss); 1 is perfect balance. Each rank differentiates the share of its own tokens, so
the sum over ranks does not depend on how the tokens are sharded. tokens_per_expert counts the K
highest scores of every token without bias and groups, which balance by other means (DeepSeek-V3,
equation 18; Megatron-LM, `compute_routing_scores_for_aux_loss`). Megatron-LM averages
global_aux_loss over dp once more; `divide_global_aux_loss_by_dp` does so too.

**Capacity.** An expert keeps the tokens of a sequence with the highest weights for it; ties go to
the earlier position. Ranks that share a sequence gather its routing first, so the result does not
depend on the sharding.

Sources: DeepSeek-V3 (2024), section 2.1.2, for sigmoid scores, groups and bias, equations 17-20 for
losses per sequence; Shazeer et al. 2017 for top-k; Fedus et al. 2021 (Switch), section 2.2, for the
loss, over the global batch as in Qiu et al. 2025, "Demons in the Detail"; Zoph et al. 2022
(ST-MoE), equation 5, for the z-loss.

    B batch   S tokens of a sequence on this rank   L all tokens of a sequence
    H hidden   E experts   K experts per token
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from nanotrain.comm.collectives import all_gather_into, all_reduce
from nanotrain.comm.group import Group
from nanotrain.config.layer_kinds import LoadBalancing, RouterScore
from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.kernels.permute import plan_permutation
from nanotrain.kernels.router_logits import router_logits
from nanotrain.model.context import LayerContext, ModelParallel
from nanotrain.model.norm import RMSNorm
from nanotrain.model.parameters import Parameters
from nanotrain.model.router_quantiles import RequiredBias
from nanotrain.model.router_stats import RouterStats, StatefulModule
from nanotrain.parallel.ep.token_dispatcher import Routing


@dataclass(frozen=True)
class BalanceTerm:
    """A load-balancing loss and its coefficient."""

    kind: LoadBalancing
    coeff: float


@dataclass(frozen=True)
class BalanceCounts:
    """The tokens that a load-balancing loss is over."""

    tokens_per_expert: Tensor  # [B, E] of every sequence, or [1, E] of all
    # sequences together; a tensor for global_aux_loss, as some ranks may have padding
    num_sequences: int | Tensor


class Router(StatefulModule):
    """Top-k router.

    Args:
        model_config: number of experts, scores, losses and capacity; epsilon of the norm of its
            input.
        params: parameters of `MoELayer`: router.weight [E, H], and router.bias [E] of the logits
            where declared; router.scale [H] of its normalized input and router.expert_scale [E] of
            the weights.
        parallel: ranks that share a sequence; ranks with different samples, for global_aux_loss;
            recomputation, as a recomputed forward counts nothing.
        layer: index in the model.

    Attributes:
        expert_bias: [E] fp32 buffer, added to the scores for the selection only; None where it is
            not enabled. Updated once per step by parts of the step and saved in checkpoints.
        required_bias: counts for quantile balancing; None for other kinds.
        stats: counts since the last collection.
    """

    expert_bias: Tensor | None

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        moe = model_config.moe
        assert moe is not None, "a dense layer has no experts"
        self.weight, self.bias = params.linear("router")
        self.scale = params.get("router.scale")
        self.expert_scale = params.get("router.expert_scale")
        self.norm: nn.Module = nn.Identity()
        if self.scale is not None:
            self.norm = RMSNorm(None, eps=model_config.norm_epsilon)
        self.moe = moe
        self.num_experts = len(self.weight)
        self.sequence = parallel.sequence
        self.dp = parallel.dp
        self._tp = parallel.routing_tp
        self._recompute = parallel.recompute
        expert_bias = torch.zeros(self.num_experts) if moe.router_enable_expert_bias else None
        self.register_buffer("expert_bias", expert_bias)
        self.required_bias = RequiredBias(moe) if moe.balances_quantiles else None
        self.stats = RouterStats(self.num_experts)
        self._balance = _balance_terms(moe, dp_size=self.dp.size)
        self.logits_of: Callable[[Tensor, Tensor], Tensor] = router_logits
        self.score = SCORES[moe.router_score_function]

    def forward(
        self, hidden: Tensor, context: LayerContext, *, positions: Callable[[], Tensor]
    ) -> Routing:
        """Route this rank's tokens.

        Args:
            hidden: [B, S, H].
            context: context of the microbatch.
            positions: returns [S] int64, the positions of these tokens in their sequence.

        Returns:
            the routing of the B * S tokens.
        """
        if self.scale is not None:
            hidden = self.norm(hidden) * (self.scale * hidden.shape[-1] ** -0.5)
        logits = self.logits_of(hidden, self.weight)
        if self.bias is not None:
            logits = logits + self.bias.float()
        scores = self.score(logits)
        probabilities = scores if self.moe.router_score_function == "softmax" else normalize(scores)
        topk_ids = self.choose(
            logits.detach(), scores.detach(), context=context, positions=positions
        )
        topk_weights = self._weights(logits, scores, topk_ids=topk_ids)
        if self.training and torch.is_grad_enabled():
            topk_weights = self._attach_losses(
                Routing(topk_ids, topk_weights),
                logits,
                probabilities=probabilities,
                context=context,
            )
        kept_ids = topk_ids
        if self.moe.expert_capacity_factor is not None:
            kept_ids = drop_over_capacity(
                Routing(topk_ids, topk_weights.detach()),
                num_experts=self.num_experts,
                capacity=expert_capacity(self.moe, hidden.shape[1] * self.sequence.size),
                positions=positions(),
                sequence=self.sequence,
            )
        permutation = plan_permutation(kept_ids.flatten(0, 1), self.num_experts)
        routing = Routing(kept_ids.flatten(0, 1), topk_weights.flatten(0, 1), permutation)
        if self._counts and not context.is_padding:
            self._count(routing, topk_ids, probabilities=probabilities.detach())
            if self.required_bias is not None and self.expert_bias is not None:
                self.required_bias.count(scores.detach(), self.expert_bias)
        return routing

    def local_tokens(self, length: int) -> slice:
        """The tokens that this rank routes, as a slice of the tokens of its tp group."""
        first = length * self._tp.index
        return slice(first, first + length)

    @property
    def _counts(self) -> bool:
        """Whether this forward pass is counted: in training, and only once if it is recomputed."""
        return self.training and torch.is_grad_enabled() and not self._recompute.is_recomputing

    def _count(self, routing: Routing, topk_ids: Tensor, *, probabilities: Tensor) -> None:
        """Count a microbatch: its routing, and the experts before any pair was dropped."""
        permutation = routing.permutation
        num_dropped = None
        if self.moe.expert_capacity_factor is not None:
            permutation = plan_permutation(topk_ids.flatten(0, 1), self.num_experts)
            num_dropped = (routing.topk_ids == self.num_experts).sum()
        assert permutation is not None
        self.stats.count(
            permutation.tokens_per_expert, num_dropped=num_dropped, probabilities=probabilities
        )

    @property
    def _ranks_logits(self) -> bool:
        """Whether experts are selected by their logits: only a bias or groups need the scores.

        Scores much lower than the best underflow to ties; logits do not.
        """
        return self.expert_bias is None and self.moe.router_num_groups is None

    def choose(
        self,
        logits: Tensor,
        scores: Tensor,
        *,
        context: LayerContext,
        positions: Callable[[], Tensor],
    ) -> Tensor:
        """[B, S, K] int64, the experts of the tokens; context and positions as of `forward`."""
        if self.moe.router_force_load_balancing:
            return self._in_turn(logits, positions())
        return self._select(logits, scores)

    def _select(self, logits: Tensor, scores: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, K] int64, best first."""
        moe = self.moe
        # the weights are a softmax of the selected logits
        has_free_scores = moe.router_score_function == "softmax" and not moe.router_pre_softmax
        ranked = scores
        if self._ranks_logits or (has_free_scores and self.expert_bias is None):
            ranked = logits
        if self.expert_bias is not None:
            ranked = ranked + self.expert_bias
        if moe.router_num_groups is not None:
            ranked = _mask_groups(ranked, moe)
        return ranked.topk(moe.router_topk, dim=-1).indices

    def _in_turn(self, logits: Tensor, positions: Tensor) -> Tensor:
        """[B, S, K] int64: round-robin over the experts by position, whatever the logits are."""
        topk = self.moe.router_topk
        first = (positions * topk)[:, None]
        turns = (first + torch.arange(topk, device=positions.device)) % self.num_experts
        return turns.expand(len(logits), -1, -1)

    def _weights(self, logits: Tensor, scores: Tensor, *, topk_ids: Tensor) -> Tensor:
        """[B, S, K] fp32."""
        weights = scores.gather(-1, topk_ids)
        if self.moe.router_score_function == "softmax":
            if not self.moe.router_pre_softmax:
                weights = logits.gather(-1, topk_ids).softmax(dim=-1)
        elif self.moe.router_topk > 1:
            weights = normalize(weights, self.moe.router_norm_epsilon)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[topk_ids]
        return weights * self.moe.router_topk_scaling_factor

    def _attach_losses(
        self, routing: Routing, logits: Tensor, *, probabilities: Tensor, context: LayerContext
    ) -> Tensor:
        """The weights with the auxiliary losses attached.

        Padding has no losses, but takes part in their collectives.
        """
        weights = routing.topk_weights
        length = logits.shape[1] * self.sequence.size
        scale = context.aux_loss_scale
        tokens: Tensor | None = None
        if self._balance:
            tokens = self._count_best(routing, logits, context=context)
        for index, term in enumerate(self._balance):
            assert tokens is not None
            counts = self._balance_counts(term.kind, tokens, length=length, context=context)
            if context.is_padding:
                continue
            num_tokens = counts.num_sequences * length
            loss = balance_loss(
                probabilities,
                counts.tokens_per_expert,
                topk=self.moe.router_topk,
                num_tokens=num_tokens,
            )
            if index == 0 and self._counts:  # the metric is the first loss
                self.stats.aux_loss += loss.detach() * num_tokens
            weights = attach_loss(weights, loss, scale=term.coeff * scale * counts.num_sequences)
        if self.moe.z_loss_coeff > 0 and not context.is_padding:
            loss = z_loss(logits)
            if self._counts:
                self.stats.z_loss += loss.detach()
            weights = attach_loss(weights, loss, scale=self.moe.z_loss_coeff * scale / length)
        return weights

    def _count_best(self, routing: Routing, logits: Tensor, *, context: LayerContext) -> Tensor:
        """[B, E] fp32, tokens per expert in each sequence, by scores alone; 0 for padding."""
        best = routing.topk_ids
        if not self._ranks_logits or self.moe.router_force_load_balancing:
            best = logits.detach().topk(self.moe.router_topk, dim=-1).indices
        tokens = count_tokens(best, num_experts=self.num_experts, sequence=self.sequence)
        return torch.zeros_like(tokens) if context.is_padding else tokens

    def _balance_counts(
        self, kind: LoadBalancing, tokens: Tensor, *, length: int, context: LayerContext
    ) -> BalanceCounts:
        """The counts of a loss.

        Args:
            kind: seq_aux_loss, aux_loss or global_aux_loss.
            tokens: [B, E], tokens per expert in each sequence of this microbatch.
            length: tokens of a sequence.
            context: context of the microbatch.
        """
        if kind == "seq_aux_loss":
            return BalanceCounts(tokens, 1)
        summed = tokens.sum(dim=0, keepdim=True)
        if kind == "aux_loss":
            return BalanceCounts(summed, len(tokens))
        if self not in context.balance_counts:
            all_reduce(summed, self.dp)
            context.balance_counts[self] = self.stats.average_tokens(summed)
        averaged = context.balance_counts[self]
        return BalanceCounts(averaged, averaged.sum() / (self.moe.router_topk * length))


def _balance_terms(moe: MoEConfig, *, dp_size: int) -> list[BalanceTerm]:
    """The load-balancing losses with a coefficient above 0."""
    terms = []
    for kind, coeff in zip(moe.router_load_balancing_type, moe.aux_loss_coeff, strict=True):
        if kind in ("none", "quantile_balancing", "sinkhorn") or coeff <= 0:
            continue
        if kind == "global_aux_loss" and moe.divide_global_aux_loss_by_dp:
            coeff = coeff / dp_size
        terms.append(BalanceTerm(kind, coeff))
    return terms


def normalize(scores: Tensor, epsilon: float = 1e-20) -> Tensor:
    """Scores divided by their sum over the last dim; epsilon avoids a division by zero."""
    return scores / (scores.sum(dim=-1, keepdim=True) + epsilon)


def _mask_groups(scores: Tensor, moe: MoEConfig) -> Tensor:
    """Minus infinity for experts outside the best groups.

    The score of a group is the sum of its best few experts.
    """
    group_topk = moe.router_group_topk or 1
    grouped = scores.unflatten(-1, (moe.router_num_groups, -1))
    num_summed = min(max(1, moe.router_topk // group_topk), grouped.shape[-1])
    best_scores = grouped.topk(num_summed, dim=-1).values
    group_scores = best_scores.sum(dim=-1)
    best = group_scores.topk(group_topk, dim=-1).indices
    penalty = torch.full(grouped.shape[:-1], -torch.inf, device=scores.device)
    penalty.scatter_(-1, best, 0.0)
    masked = grouped + penalty[..., None]
    return masked.flatten(-2)


SCORES: dict[RouterScore, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}


def count_tokens(topk_ids: Tensor, *, num_experts: int, sequence: Group) -> Tensor:
    """Tokens of every expert in each sequence.

    Args:
        topk_ids: [B, S, K] int64, the experts with the highest scores.
        num_experts: E.
        sequence: the ranks that hold the tokens of one sequence.

    Returns:
        [B, E] fp32.
    """
    ids = topk_ids.flatten(1)
    counts = torch.zeros(len(ids), num_experts, device=ids.device)
    counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=counts.dtype))
    all_reduce(counts, sequence)
    return counts


def balance_loss(
    probabilities: Tensor, tokens_per_expert: Tensor, *, topk: int, num_tokens: int | Tensor
) -> Tensor:
    """The contribution of these tokens to a load-balancing loss, summed over sequences.

    Args:
        probabilities: [B, S, E] fp32, summing to one per token.
        tokens_per_expert: [B, E] of every sequence, or [1, E] of all tokens of the loss.
        topk: K.
        num_tokens: T.
    """
    num_experts = probabilities.shape[-1]
    scale = num_experts / (topk * num_tokens**2)
    return (tokens_per_expert * probabilities.sum(dim=1)).sum() * scale


def z_loss(logits: Tensor) -> Tensor:
    """The sum over this rank's tokens of logsumexp(logits)^2; [B, S, E] fp32 -> scalar."""
    return logits.logsumexp(dim=-1).square().sum()


def attach_loss(x: Tensor, loss: Tensor, *, scale: float | Tensor) -> Tensor:
    """`x` unchanged; its backward pass also differentiates `loss`, a scalar, times `scale`."""
    attached: Tensor = _AttachLoss.apply(x, loss, scale)
    return attached


class _AttachLoss(torch.autograd.Function):
    """Returns x, and gives `loss` the gradient `scale` in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        """x unchanged."""
        ctx.scale = scale
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradient of x unchanged, and `scale` as the gradient of the loss."""
        grad = grads[0]
        if isinstance(ctx.scale, Tensor):
            return grad, ctx.scale.to(ctx.dtype), None
        return grad, torch.full((), ctx.scale, dtype=ctx.dtype, device=grad.device), None


def expert_capacity(moe: MoEConfig, length: int) -> int:
    """Tokens of a sequence that an expert takes: an even share times the factor, rounded up.

    >>> expert_capacity(MoEConfig(num_experts=8, router_topk=2, expert_capacity_factor=1.25), 64)
    20
    """
    assert moe.num_experts is not None and moe.expert_capacity_factor is not None
    scaled = moe.expert_capacity_factor * length * moe.router_topk / moe.num_experts
    return min(length, math.ceil(scaled))


def drop_over_capacity(
    routing: Routing, *, num_experts: int, capacity: int, positions: Tensor, sequence: Group
) -> Tensor:
    """Mark the pairs beyond the capacity of their expert.

    Args:
        routing: topk_ids and topk_weights, [B, S, K].
        num_experts: E.
        capacity: tokens of a sequence that an expert takes.
        positions: [S] int64, the positions of this rank's tokens in their sequence.
        sequence: the ranks that hold the tokens of one sequence.

    Returns:
        [B, S, K] int64: the experts, with E for dropped pairs.
    """
    gathered, gathered_positions = _gather_sequence(routing, positions, sequence=sequence)
    batch, length, _ = gathered.topk_ids.shape
    # The weight of every token for every expert, by position; -1 where the token does not choose
    # the expert.
    weights = gathered.topk_weights.new_full((batch, length, num_experts), -1.0)
    samples = torch.arange(batch, device=weights.device)[:, None, None]
    rows = gathered_positions[:, None].expand_as(gathered.topk_ids[0])
    weights[samples, rows, gathered.topk_ids] = gathered.topk_weights
    order = weights.argsort(dim=1, descending=True, stable=True)
    best = order[:, :capacity]
    is_kept = torch.zeros_like(weights, dtype=torch.bool)
    is_kept.scatter_(1, best, True)
    is_kept_here = is_kept[:, positions].gather(2, routing.topk_ids)
    return routing.topk_ids.masked_fill(~is_kept_here, num_experts)


def _gather_sequence(
    routing: Routing, positions: Tensor, *, sequence: Group
) -> tuple[Routing, Tensor]:
    """The routing of full sequences [B, L, K] and their positions [L], in any order.

    One collective: ids, positions and the bits of the weights are packed.
    """
    batch, _, topk = routing.topk_ids.shape
    ids = routing.topk_ids.to(torch.int32)
    columns = positions.to(torch.int32)[None, :, None]
    columns = columns.expand(batch, -1, 1)
    weight_bits = routing.topk_weights.contiguous().view(torch.int32)
    packed = torch.cat([ids, weight_bits, columns], dim=-1)
    gathered = packed.new_empty((sequence.size, *packed.shape))
    all_gather_into(gathered, packed, group=sequence)
    unpacked = rearrange(gathered, "r b s c -> b (r s) c")
    ids, weight_bits, columns = unpacked.split([topk, topk, 1], dim=-1)
    weights = weight_bits.contiguous().view(torch.float32)
    gathered_positions = columns[0, :, 0].long()
    return Routing(ids.long(), weights), gathered_positions
