"""The losses of a router, and how they enter the backward pass without passing through the model.

    balance_loss   per sequence: E / (K S^2) * sum over experts of (choices of it) * (sum of its probabilities)
    z_loss         per token: logsumexp(logits)^2, which keeps logits small
    join_loss      hangs a loss to a tensor of the forward pass; its gradient flows whenever the tensor's does

A sequence's choices are counted over all ranks that hold its tokens; each rank then differentiates its own tokens'
share. So the sum over ranks is the same however the tokens are spread.

Sources: Fedus et al. 2021 (Switch), section 2.2, per sequence as in DeepSeek-V3, equations 17-20; Zoph et al. 2022
(ST-MoE), equation 5.

    B batch   S tokens of a sequence on this rank   E experts   K experts per token
"""

from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group


def balance_loss(probabilities: Tensor, experts: Tensor, *, sequence: Group) -> Tensor:
    """This rank's share of the load-balancing losses of all its sequences, summed; 1 per sequence is perfect balance.

    Args:
        probabilities: [B, S, E] fp32, summing to one per token.
        experts: [B, S, K] int64, the choices before any were dropped.
        sequence: the ranks that hold the tokens of one sequence.
    """
    num_experts, topk = probabilities.shape[-1], experts.shape[-1]
    length = probabilities.shape[1] * sequence.size
    chosen = experts.flatten(1)
    counts = probabilities.new_zeros(len(experts), num_experts)
    counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=counts.dtype))
    all_reduce(counts, sequence)
    return (counts * probabilities.sum(dim=1)).sum() * (num_experts / (topk * length**2))


def z_loss(logits: Tensor) -> Tensor:
    """The sum over this rank's tokens of logsumexp(logits)^2; [B, S, E] fp32 -> scalar."""
    return logits.logsumexp(dim=-1).square().sum()


def join_loss(x: Tensor, loss: Tensor) -> Tensor:
    """`x` unchanged; differentiating anything made of it differentiates `loss` too, with factor one."""
    joined: Tensor = _Join.apply(x, loss)
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)
