"""Auxiliary losses of a router, and how they enter the backward pass.

    seq_aux_loss   per sequence: E / (K S^2) * sum over experts of tokens of the expert * sum of its probabilities
    aux_loss       the same with the sequences of a microbatch as one, which depends on the micro-batch size
    z_loss         per token: logsumexp(logits)^2, which keeps logits small
    attach_loss    adds a loss to the backward pass of a tensor (Megatron-LM's MoEAuxLossAutoScaler)

Tokens per expert of a sequence are summed over all ranks that hold its tokens. Each rank then differentiates the share
of its own tokens, so the sum over ranks does not depend on how the tokens are sharded.

Sources: Fedus et al. 2021 (Switch), section 2.2, per sequence as in DeepSeek-V3, equations 17-20; Zoph et al. 2022
(ST-MoE), equation 5.

    B batch   S tokens of a sequence on this rank   E experts   K experts per token
"""

from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group


def seq_aux_loss(probabilities: Tensor, topk_ids: Tensor, *, sequence: Group) -> Tensor:
    """This rank's share of the load-balancing losses of its sequences, summed; 1 per sequence is perfect balance.

    Args:
        probabilities: [B, S, E] fp32, summing to one per token.
        topk_ids: [B, S, K] int64, before any pair is dropped.
        sequence: the ranks that hold the tokens of one sequence.
    """
    num_experts, topk = probabilities.shape[-1], topk_ids.shape[-1]
    length = probabilities.shape[1] * sequence.size
    ids = topk_ids.flatten(1)
    tokens_per_expert = probabilities.new_zeros(len(topk_ids), num_experts)
    tokens_per_expert.scatter_add_(1, ids, torch.ones_like(ids, dtype=probabilities.dtype))
    all_reduce(tokens_per_expert, sequence)
    return (tokens_per_expert * probabilities.sum(dim=1)).sum() * (num_experts / (topk * length**2))


def aux_loss(probabilities: Tensor, topk_ids: Tensor, *, sequence: Group) -> Tensor:
    """This rank's share of the load-balancing loss of its microbatch, times its sequences; as `seq_aux_loss`."""
    pooled = seq_aux_loss(probabilities.flatten(0, 1)[None], topk_ids.flatten(0, 1)[None], sequence=sequence)
    return pooled * len(probabilities)


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
