"""Causal attention in bf16 on CPUs with AVX-512 and without AMX, by products of whole blocks of scores.

torch's flash attention multiplies small blocks of 16-bit matrices, which is slow without AMX. Here the scores of some
queries and all earlier keys are one fp32 product by oneDNN (`onednn.py`), and the products with probabilities and with
the gradients of scores are bf16 ones, as in torch's. Measured on one core (AMD EPYC), forward and backward, ms:

    B, S, N, G, D         torch   here
    4, 512, 6, 6, 64         60     36
    4, 256, 8, 4, 32         18     13       key/value heads repeated for torch
    4, 512, 8, 2, 64         84     50       the same
    2, 512, 4, 4, 128        36     20

With two threads, each computes other heads (`parts.py`):

    4, 512, 6, 6, 64         34     24
    4, 512, 8, 2, 64         44     32       the same
    2, 512, 4, 4, 128        19     12
    4, 256, 8, 4, 32         10      9       the same

Nothing but query, key and value is saved; the backward computes the scores again.

    for each key/value head, with its n = N/G query heads:        (a, b] block of queries
        forward    P = softmax(Q K^T / sqrt(D))                     [n (b-a), b]
                   out = P V
        backward   dS = P * (dP - sum(P * dP)), dP = dO V^T
                   dQ = dS K       dK = dS^T Q       dV = P^T dO    over all queries of the n heads at once

B batch   S sequence   N query heads   G key/value heads (N is a multiple of G)   D, Dv head dims
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanotrain.kernels import onednn
from nanotrain.kernels.parts import divide

# Shorter sequences are many small products; longer ones write matrices of probabilities that leave the cache.
MIN_LENGTH, MAX_LENGTH = 256, 512
# Scores of a block, in elements: they stay in the second-level cache.
BLOCK_SCORES = 2**17
MAX_THREADS = 2  # more were not measured; they may wait for Python, which runs in one at a time

_Head = tuple[int, int]  # sample, key/value head


def computes(query: Tensor, key: Tensor) -> bool:
    """Whether `attend` computes attention of queries [B, S, N, D] to keys [B, S, G, D]; never in compiled graphs."""
    length = query.shape[1]
    return (
        query.dtype is torch.bfloat16
        and query.device.type == "cpu"
        and onednn.is_available()  # before the sizes, on which a compiled graph would depend
        and not torch.cpu._is_amx_tile_supported()
        and torch.get_num_threads() <= min(MAX_THREADS, len(key) * key.shape[2])
        and length == key.shape[1]
        and MIN_LENGTH <= length <= MAX_LENGTH
        and length % onednn.TOKENS == 0
    )


def attend(query: Tensor, *, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention to the same and all earlier positions.

    Args:
        query: [B, S, N, D].
        key: [B, S, G, D].
        value: [B, S, G, Dv].

    Returns:
        [B, S, N, Dv].
    """
    out: Tensor = _CausalAttention.apply(query, key, value)
    return out


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        out, blocks = query.new_empty(*query.shape[:3], value.shape[3]), _Blocks.of(query, key)

        def compute(heads: Sequence[_Head]) -> None:
            for sample, groups in _by_sample(heads):
                wide_q, wide_k = blocks.scaled(query[sample]), _by_head(key[sample])
                results = blocks.by_group(out[sample].transpose(0, 1))
                for group in groups:
                    for rows in blocks.rows:
                        p = blocks.probabilities(wide_q[group], wide_k[group], rows=rows)
                        low = p.to(value.dtype).flatten(0, 1)
                        _multiply(low, value[sample, : rows.stop, group], out=results[group, :, rows])

        divide(compute, blocks.heads)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
        blocks, length = _Blocks.of(query, key), query.shape[1]

        def compute(heads: Sequence[_Head]) -> None:
            # probabilities and gradients of Q K^T; what lies above the blocks on the diagonal stays zero
            p, grad_scores = query.new_zeros(2, blocks.num_heads, length, length)
            flat_p, flat_scores = p.flatten(0, 1), grad_scores.flatten(0, 1)
            for sample, groups in _by_sample(heads):
                wide_q, wide_grad = blocks.scaled(query[sample]), blocks.scaled(grads[0][sample])
                wide_k, wide_v = _by_head(key[sample]), _by_head(value[sample])
                q, grad_out, grad_q = (
                    blocks.by_group(x[sample].transpose(0, 1)) for x in (query, grads[0], grad_query)
                )
                for group in groups:
                    for rows in blocks.rows:
                        block = blocks.probabilities(wide_q[group], wide_k[group], rows=rows)
                        grad_p = onednn.multiply(wide_grad[group, :, rows].flatten(0, 1), wide_v[group, : rows.stop])
                        p[:, rows, : rows.stop] = block
                        grad_scores[:, rows, : rows.stop] = torch._softmax_backward_data(
                            grad_p.view(block.shape), block, 2, torch.float32
                        )
                    _multiply(flat_scores, key[sample, :, group], out=grad_q[group])
                    torch.mm(flat_scores.t(), q[group].flatten(0, 1), out=grad_key[sample, :, group])
                    torch.mm(flat_p.t(), grad_out[group].flatten(0, 1), out=grad_value[sample, :, group])

        divide(compute, blocks.heads)
        return grad_query, grad_key, grad_value


def _by_sample(heads: Sequence[_Head]) -> Iterator[tuple[int, list[int]]]:
    """Samples with their key/value heads."""
    for sample, found in groupby(heads, key=itemgetter(0)):
        yield sample, [group for _, group in found]


@dataclass(frozen=True)
class _Blocks:
    """The key/value heads of a batch, and the blocks into which the queries of each one's query heads are divided."""

    heads: Sequence[_Head]
    num_heads: int  # n
    scale: float  # of scores
    rows: tuple[slice, ...]
    later: Tensor  # [rows, rows] minus infinity for later keys, in the block on the diagonal

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> "_Blocks":
        """The blocks for queries [B, S, N, D] and keys [B, S, G, D]."""
        length, num_heads = query.shape[1], query.shape[2] // key.shape[2]
        heads = [(sample, group) for sample in range(len(key)) for group in range(key.shape[2])]
        size = min(length, max(onednn.TOKENS, BLOCK_SCORES // (length * num_heads)))
        rows = tuple(slice(start, min(start + size, length)) for start in range(0, length, size))
        later = torch.full((size, size), -torch.inf).triu_(1)
        return cls(heads, num_heads, query.shape[3] ** -0.5, rows, later)

    def by_group(self, x: Tensor) -> Tensor:
        """[N, S, D] -> [G, n, S, D]."""
        return x.unflatten(0, (-1, self.num_heads))

    def scaled(self, x: Tensor) -> Tensor:
        """[S, N, D] -> [G, n, S, D] in fp32, times the scale of scores."""
        return self.by_group(_by_head(x).mul_(self.scale))

    def probabilities(self, q: Tensor, k: Tensor, *, rows: slice) -> Tensor:
        """Scaled queries [n, S, D] and keys [S, D] -> [n, rows, keys up to the last row]."""
        scores = onednn.multiply(q[:, rows].flatten(0, 1), k[: rows.stop]).view(self.num_heads, -1, rows.stop)
        size = rows.stop - rows.start
        scores[:, :, rows].add_(self.later[:size, :size])
        return scores.softmax(2)


def _by_head(x: Tensor) -> Tensor:
    """[S, N, D] -> [N, S, D] in fp32, contiguous."""
    return x.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)


def _multiply(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """[n rows, K], [K, D] -> `out` [n, rows, D]."""
    if len(out) == 1:
        torch.mm(a, b, out=out[0])
    else:
        out.copy_((a @ b).view(out.shape))
