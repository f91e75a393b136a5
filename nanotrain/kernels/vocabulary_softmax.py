"""Softmax part of the vocabulary loss, between two matrix products: label log-probabilities and gradients of logits.

bytes per logit in bf16     torch: 2 read, 4 written, 4 + 4 exp, 4 + 2 conversion = 20
                            Triton: 2 read for the log-sum-exp, 2 + 2 for the gradient in place = 6

The loss is outside of compiled graphs, so on GPUs a Triton kernel does what the compiler does elsewhere. Its module
imports Triton, so it is imported where it is called: on a CPU never.

t tokens of a chunk   V columns of the local vocabulary shard
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # from which the kernels compute, in fp32
Combine = Callable[[Tensor], Tensor]


def softmax_gradient(logits: Tensor, *, column: Tensor, is_local: Tensor, combine: Combine) -> tuple[Tensor, Tensor]:
    """The log-probability of each label, and the gradient of its negative by the logits.

    Args:
        logits: [t, V]; may be overwritten.
        column: [t, 1] int64, position of the label, arbitrary where it is in another shard.
        is_local: [t, 1] fp32, 1 where the label is in this shard, else 0.
        combine: [t, 1] log-sum-exp of the local columns -> that of all ranks.

    Returns:
        [t] fp32, 0 where the label is not local; and [t, V], fp32 or in the memory of the logits.
    """
    compute = _by_triton if _uses_triton(logits) else _by_torch
    return compute(logits, column=column, is_local=is_local, combine=combine)


def _uses_triton(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype in TRITON_DTYPES and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None  # CUDA builds of torch install it


def _by_torch(logits: Tensor, *, column: Tensor, is_local: Tensor, combine: Combine) -> tuple[Tensor, Tensor]:
    log_probs = normalize(logits, combine)
    picked = (log_probs.gather(1, column) * is_local)[:, 0]
    return picked, log_probs.exp_().scatter_add_(1, column, -is_local)


def _by_triton(logits: Tensor, *, column: Tensor, is_local: Tensor, combine: Combine) -> tuple[Tensor, Tensor]:
    from nanotrain.kernels import triton_softmax

    logsumexp = combine(triton_softmax.row_logsumexp(logits))
    picked = ((logits.gather(1, column).float() - logsumexp) * is_local)[:, 0]
    return picked, triton_softmax.softmax_gradient_(logits, logsumexp=logsumexp, column=column, is_local=is_local)


def normalize(logits: Tensor, combine: Combine) -> Tensor:
    """Log-softmax over the columns of all ranks: [t, V] -> [t, V] fp32."""
    log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    local = logits[:, :1].float() - log_probs[:, :1]  # the local log-sum-exp, from any column
    total = combine(local)
    return log_probs if total is local else log_probs.add_(local - total)
