"""Which experts a token goes to, and how much each counts.

    logits    [E] per token, in fp32 whatever the activations are
    scores    softmax or sigmoid of them (SCORES)
    experts   the K best by score (+ bias), within the best groups only where there are groups
    weights   what each expert's answer is multiplied by; never touched by the bias
    losses    load balance and z-loss, joined to the weights so that their gradients flow (router_loss.py)
    capacity  choices beyond what an expert takes are dropped (capacity.py)
    tally     what was chosen, for the metrics and for the bias (router_load.py)

Sources: DeepSeek-V3 (2024), section 2.1.2, for sigmoid scores, groups and bias; Shazeer et al. 2017 for top-k.

    B batch   S tokens of a sequence on this rank   H hidden   E experts   K experts per token
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.group import Group
from nanotrain.config.config import LoadBalancing, ModelConfig, RouterScore
from nanotrain.model.capacity import capacity_of, within_capacity
from nanotrain.model.router_load import RouterTally
from nanotrain.model.router_loss import balance_loss, join_loss, z_loss
from nanotrain.parallel.ep.token_dispatcher import Routing

_TINY = 1e-20  # keeps a sum of vanishing scores from dividing by zero


@dataclass(frozen=True)
class MoEContext:
    """What every mixture-of-experts layer of a batch needs beside the activations.

    Args:
        aux_scale: factor of one sequence's auxiliary losses in what is differentiated; loss scale / sequences of the
            global batch makes them a mean over sequences.
        places: [S] int64, where this rank's tokens stand in their sequence; None for 0..S-1. Before any cut over tp.
    """

    aux_scale: float = 0.0
    places: Tensor | None = None


class Router(nn.Module):
    """Chooses the experts of every token.

    Args:
        model_config: the whole model's shape.
        dtype: of the weight.
        sequence: the ranks that hold the tokens of one sequence.

    Attributes:
        expert_bias: [E] fp32, added to scores for the choice only; None where it is not asked for. No parameter: it is
            moved once per step by `router_load.update_expert_bias`, and part of what a checkpoint saves.
        tally: what was chosen since the last harvest.
    """

    def __init__(self, model_config: ModelConfig, *, dtype: torch.dtype, sequence: Group) -> None:
        super().__init__()
        assert model_config.moe.num_experts is not None, "a dense layer has no router"
        self.model, self.sequence = model_config, sequence
        self.num_experts = model_config.moe.num_experts
        self.weight = nn.Parameter(
            torch.empty((self.num_experts, model_config.hidden_size), dtype=dtype, device="meta")
        )
        self.expert_bias = torch.zeros(self.num_experts) if model_config.moe.router_enable_expert_bias else None
        self.tally = RouterTally(self.num_experts)
        is_balanced = model_config.moe.router_load_balancing_type is LoadBalancing.seq_aux_loss
        self._balance_coeff = model_config.moe.aux_loss_coeff if is_balanced else 0.0

    def forward(self, hidden: Tensor, context: MoEContext, *, places: Tensor) -> Routing:
        """Choose.

        Args:
            hidden: [B, S, H], the tokens of this rank alone.
            context: of the batch.
            places: [S] int64, where these tokens stand in their sequence.

        Returns:
            the choices of all B * S tokens.
        """
        logits = F.linear(hidden.float(), self.weight.float())
        scores = SCORES[self.model.moe.router_score_function](logits)
        experts = self._choose(scores.detach())
        weights = self._weigh(logits, scores, experts=experts)
        is_training = self.training and torch.is_grad_enabled()
        if is_training:
            weights = self._with_losses(weights, logits, scores=scores, experts=experts, scale=context.aux_scale)
        kept = experts
        if self.model.moe.expert_capacity_factor is not None:
            length = hidden.shape[1] * self.sequence.size
            capacity = capacity_of(self.model, length)
            kept = within_capacity(
                Routing(experts, weights.detach()),
                num_experts=self.num_experts,
                capacity=capacity,
                places=places,
                sequence=self.sequence,
            )
        if is_training:
            self.tally.add(experts, kept=kept, probabilities=_probabilities(scores.detach()))
        return Routing(kept.flatten(0, 1), weights.flatten(0, 1))

    def _choose(self, scores: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, K] int64, best first."""
        model_config = self.model
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.to(scores.device)
            scores = scores + self.expert_bias
        if model_config.moe.router_num_groups is not None:
            scores = _best_groups_only(scores, model_config)
        return scores.topk(model_config.moe.router_topk, dim=-1).indices

    def _weigh(self, logits: Tensor, scores: Tensor, *, experts: Tensor) -> Tensor:
        """[B, S, K] fp32."""
        model_config = self.model
        weights = scores.gather(-1, experts)
        if model_config.moe.router_score_function is RouterScore.softmax:
            if not model_config.moe.router_pre_softmax:
                weights = logits.gather(-1, experts).softmax(dim=-1)
        elif model_config.moe.router_topk > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
        return weights * model_config.moe.router_topk_scaling_factor

    def _with_losses(self, weights: Tensor, logits: Tensor, *, scores: Tensor, experts: Tensor, scale: float) -> Tensor:
        """The weights, with the auxiliary losses hung to them."""
        model_config, length = self.model, logits.shape[1] * self.sequence.size
        if self._balance_coeff > 0:
            loss = balance_loss(_probabilities(scores), experts, sequence=self.sequence)
            self.tally.add_balance_loss(loss.detach() * length)
            weights = join_loss(weights, loss * (self._balance_coeff * scale))
        if model_config.moe.z_loss_coeff > 0:
            loss = z_loss(logits)
            self.tally.add_z_loss(loss.detach())
            weights = join_loss(weights, loss * (model_config.moe.z_loss_coeff * scale / length))
        return weights


def _probabilities(scores: Tensor) -> Tensor:
    """Scores that sum to one; those of softmax do already."""
    return scores / (scores.sum(dim=-1, keepdim=True) + _TINY)


def _best_groups_only(scores: Tensor, model_config: ModelConfig) -> Tensor:
    """Minus infinity for every expert outside the best groups; a group is as good as its best few experts together."""
    num_groups, num_kept = model_config.moe.router_num_groups, model_config.moe.router_group_topk or 1
    grouped = scores.unflatten(-1, (num_groups, -1))
    num_counted = min(max(1, model_config.moe.router_topk // num_kept), grouped.shape[-1])
    best = grouped.topk(num_counted, dim=-1).values.sum(dim=-1).topk(num_kept, dim=-1).indices
    is_best = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, True)
    return grouped.masked_fill(~is_best[..., None], float("-inf")).flatten(-2)


SCORES: dict[RouterScore, Callable[[Tensor], Tensor]] = {
    RouterScore.softmax: lambda logits: logits.softmax(dim=-1),
    RouterScore.sigmoid: torch.sigmoid,
}
