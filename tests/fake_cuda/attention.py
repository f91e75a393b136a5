"""torch's operators of attention on CUDA, written out in fp32 over the same memory.

    Options         of a call
    flash           one sequence per sample, or sequences of varying length end to end
    flash_backward  with the output and the log-sum-exp that the caller gives, as ring attention needs

B batch   S queries   T keys   N query heads   G key/value heads   D head dim
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fake_cuda.memory import on_cpu, to_device

Inputs = tuple[Tensor, Tensor, Tensor]  # query, key, value
# first tokens of sequences of varying length, of queries and of keys
Bounds = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Options:
    """What torch's operators take beside tensors."""

    scale: float
    is_causal: bool
    # keys to the left and to the right; None or -1 for all
    window: tuple[int | None, int | None] = (None, None)

    def hidden(self, num_queries: int, num_keys: int) -> Tensor:
        """[S, T] bool: the keys that a query does not see; the last query is at the last key."""
        distance = torch.arange(num_keys) - torch.arange(num_keys - num_queries, num_keys)[:, None]
        left, right = (None if size is None or size < 0 else size for size in self.window)
        right = 0 if self.is_causal else right
        hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
        if left is not None:
            hidden |= distance < -left
        if right is not None:
            hidden |= distance > right
        return hidden


def flash(inputs: Inputs, bounds: Bounds, options: Options) -> tuple[Tensor, Tensor]:
    """[B, S, N, D] or [tokens, N, D], on the device -> output, log-sum-exp [B, N, S] or [N, tokens]
    in fp32.
    """
    q, _, v = inputs
    out = torch.zeros(*q.shape[:-1], v.shape[-1])
    lse = torch.zeros(*q.shape[:-3], q.shape[-2], q.shape[-3])
    for at, one in _sequences(inputs, bounds):
        found, one_lse = _forward(one, options)
        out[at[0]] = found.transpose(0, 1)
        lse[_of_heads(at[0])] = one_lse
    return to_device(out.to(q.dtype), q.device), to_device(lse, q.device)


def flash_backward(
    grad: Tensor, inputs: Inputs, saved: tuple[Tensor, Tensor], bounds: Bounds, options: Options
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value; `saved` are output and log-sum-exp."""
    wide_grad, out, lse = (on_cpu(x).float() for x in (grad, *saved))
    grads = [torch.zeros(x.shape) for x in inputs]
    for at, one in _sequences(inputs, bounds):
        rows = at[0]
        given = (wide_grad[rows].transpose(0, 1), out[rows].transpose(0, 1), lse[_of_heads(rows)])
        for total, where, part in zip(grads, at, _backward(one, given, options), strict=True):
            total[where] = part.transpose(0, 1)
    return tuple(to_device(x.to(grad.dtype), grad.device) for x in grads)


def _forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """[N, S, D], [G, T, D], [G, T, D] in fp32 -> output [N, S, D], log-sum-exp [N, S]."""
    q, k, v = _repeated(inputs)
    scores = (q @ k.mT * options.scale).masked_fill(
        options.hidden(q.shape[1], k.shape[1]), -math.inf
    )
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse.isinf(), 0)[..., None]).exp() @ v, lse


def _backward(inputs: Inputs, given: tuple[Tensor, Tensor, Tensor], options: Options) -> Inputs:
    """The gradients of `_forward`, given that of the output, the output and the log-sum-exp."""
    (q, k, v), (grad, out, lse) = _repeated(inputs), given
    p = (
        (q @ k.mT * options.scale - lse[..., None])
        .exp()
        .masked_fill(options.hidden(q.shape[1], k.shape[1]), 0)
    )
    grad_scores = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * options.scale
    repeats = len(q) // len(inputs[1])
    grad_k, grad_v = (
        x.unflatten(0, (-1, repeats)).sum(1) for x in (grad_scores.mT @ q, p.mT @ grad)
    )
    return grad_scores @ k, grad_k, grad_v


def _repeated(inputs: Inputs) -> Inputs:
    """Key and value heads, one for each query head."""
    q, k, v = inputs
    repeats = len(q) // len(k)
    return q, k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)


def _sequences(inputs: Inputs, bounds: Bounds) -> Iterator[tuple[tuple[Any, Any, Any], Inputs]]:
    """The index of each sequence in query, key and value, and the three at it: [heads, tokens, D]
    in fp32.
    """
    q, k, v = (on_cpu(x).float() for x in inputs)
    if bounds[0] is None or bounds[1] is None:
        places = [(sample, sample) for sample in range(len(q))]
    else:
        starts_q, starts_k = (on_cpu(x).tolist() for x in bounds if x is not None)
        spans = (
            [slice(*pair) for pair in zip(s[:-1], s[1:], strict=True)] for s in (starts_q, starts_k)
        )
        places = list(zip(*spans, strict=True))
    for rows, columns in places:
        yield (
            (rows, columns, columns),
            (q[rows].transpose(0, 1), k[columns].transpose(0, 1), v[columns].transpose(0, 1)),
        )


def _of_heads(rows: Any) -> Any:
    """The index of a sequence in [B, N, S] or [N, tokens]."""
    return (slice(None), rows) if isinstance(rows, slice) else rows
