"""Auxiliary losses of a router, and how they enter the backward pass.

    balance_loss   E / (K T^2) * sum over experts of tokens of the expert * sum of its probabilities, over T tokens
    count_tokens   the tokens of every expert, over the ranks of some groups
    z_loss         per token: logsumexp(logits)^2, which keeps logits small
    attach_loss    adds a loss to the backward pass of a tensor (Megatron-LM's MoEAuxLossAutoScaler)

The T tokens are those of a sequence (seq_aux_loss), of a microbatch (aux_loss), or of a microbatch of all ranks, with
the mean tokens_per_expert of the microbatches so far (global_aux_loss); 1 is perfect balance. Each rank differentiates
the share of its own tokens, so the sum over ranks does not depend on how the tokens are sharded.

The tokens of an expert are those with it among their K highest scores: neither bias nor groups count, which
balance by other means (DeepSeek-V3, equation 18; Megatron-LM, `compute_routing_scores_for_aux_loss`).

Sources: Fedus et al. 2021 (Switch), section 2.2, per sequence as in DeepSeek-V3, equations 17-20, over the global batch
as in Qiu et al. 2025, "Demons in the Detail"; Zoph et al. 2022 (ST-MoE), equation 5.

    B batch   S tokens of a sequence on this rank   E experts   K experts per token
"""

from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group


def count_tokens(topk_ids: Tensor, *, num_experts: int, sequence: Group) -> Tensor:
    """Tokens of every expert in each sequence.

    Args:
        topk_ids: [B, S, K] int64, the experts with the highest scores, without bias, groups and capacity.
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


def balance_loss(probabilities: Tensor, tokens_per_expert: Tensor, *, topk: int, num_tokens: int | Tensor) -> Tensor:
    """The contribution of these tokens to a load-balancing loss, summed over sequences.

    Args:
        probabilities: [B, S, E] fp32, summing to one per token.
        tokens_per_expert: [B, E] of every sequence, or [1, E] of all tokens that the loss is over.
        topk: K.
        num_tokens: T.
    """
    num_experts = probabilities.shape[-1]
    return (tokens_per_expert * probabilities.sum(dim=1)).sum() * (num_experts / (topk * num_tokens**2))


def z_loss(logits: Tensor) -> Tensor:
    """The sum over this rank's tokens of logsumexp(logits)^2; [B, S, E] fp32 -> scalar."""
    return logits.logsumexp(dim=-1).square().sum()


def attach_loss(x: Tensor, loss: Tensor) -> Tensor:
    """`x` unchanged; its backward pass also differentiates `loss`, with factor one."""
    attached: Tensor = _AttachLoss.apply(x, loss)
    return attached


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)
