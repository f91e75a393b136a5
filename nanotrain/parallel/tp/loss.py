"""Cross-entropy straight from hidden states, over a vocabulary cut by rows: `vocab_parallel_cross_entropy`.

The logits of all tokens at once are the largest activation of a training step (vocabulary x tokens, in fp32), so they
are made a chunk of tokens at a time and never kept: the gradients are computed in the forward, from the same
chunk, and only scaled in the backward. Nor are they ever gathered. Each rank normalizes over its own part of the
vocabulary, and one number for each token tells it how much that part weighs:

    rank 0   log-sum-exp over words 0..49    a0 --+-- all-gather --> log-sum-exp over all words = log(e^a0 + e^a1)
    rank 1   log-sum-exp over words 50..99   a1 --+

One sum at the end collects the losses of the labels, each known to the rank that holds its word.

    T tokens   H hidden   V vocabulary   Vp vocabulary with padding
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.comm.collectives import start_all_gather, start_all_reduce
from nanotrain.comm.group import Group

# Logits of one chunk. On the CPU they stay in the cache (measured at V = 8192, H = 384, one core, against one piece:
# fp32 400 -> 314 ms, bf16 238 -> 132 ms); on a GPU fewer and larger matrix products win.
CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}
# Below this the sum over chunks of [V, H] weight gradients would cost more than the logits save.
MIN_CHUNK_TOKENS = 256


def vocab_parallel_cross_entropy(
    hidden: Tensor, weight: Tensor, *, labels: Tensor, loss_mask: Tensor, vocab_size: int, group: Group
) -> Tensor:
    """The sum over unmasked tokens of -log softmax(hidden @ weight.T)[label]; padded logits take no part.

    Args:
        hidden: [T, H], entered: its gradient is this rank's part of a sum over the group.
        weight: [Vp/tp, H], this rank's rows; those from vocab_size on are padding and get a zero gradient.
        labels: [T] int64 below vocab_size.
        loss_mask: [T] fp32, the weight of each token's loss (0 leaves it out).
        vocab_size: V.
        group: the ranks that the vocabulary is cut over.

    Returns:
        fp32 scalar, the same on every rank of the group.
    """
    words = _Words.of(weight, vocab_size, group=group)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _loss_with_gradients(hidden, weight, labels=labels, loss_mask=loss_mask, words=words)
        return loss
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for part in _chunks(hidden, words):
        target = words.find(labels[part])
        log_probs = words.log_probs(hidden[part], weight)
        total -= target.pick(log_probs, loss_mask[part])
    return start_all_reduce(total, group).wait()


@dataclass(frozen=True)
class _Target:
    """Where each token's label stands among a rank's words.

    Args:
        column: [t, 1] int64, any where the word is not held.
        is_held: [t, 1] fp32, 1 where the rank holds the word, 0 elsewhere.
    """

    column: Tensor
    is_held: Tensor

    def pick(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        """The sum of the labels' log-probabilities, of those held here."""
        return (log_probs.gather(1, self.column) * self.is_held)[:, 0].mul_(mask).sum()


@dataclass(frozen=True)
class _Words:
    """The words of the vocabulary that a rank holds.

    Args:
        group: the ranks that hold all of them.
        start: the first one's number.
        num_real: how many of the rows are words, not padding; at least 1, see `is_padding`.
        num_columns: the most words that any rank holds, so that all ranks cut the tokens into the same chunks.
        is_padding: all rows are: then one of them takes part, with a logit that weighs nothing.
    """

    group: Group
    start: int
    num_real: int
    num_columns: int
    is_padding: bool

    @classmethod
    def of(cls, weight: Tensor, vocab_size: int, *, group: Group) -> "_Words":
        start = group.index * weight.shape[0]
        num_real = min(weight.shape[0], vocab_size - start)
        return cls(group, start, max(1, num_real), min(weight.shape[0], vocab_size), num_real < 1)

    def find(self, labels: Tensor) -> _Target:
        """[t] int64 -> where they stand."""
        column = labels[:, None] - self.start
        is_held = (column >= 0) & (column < self.num_real) & (not self.is_padding)
        return _Target(column.clamp(0, self.num_real - 1), is_held.float())

    def log_probs(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[t, H] -> [t, num_real] fp32, normalized over the whole vocabulary."""
        logits = F.linear(hidden, weight[: self.num_real])
        if self.is_padding:
            logits.fill_(torch.finfo(logits.dtype).min / 2)
        return _normalize(logits, self.group)


def _normalize(logits: Tensor, group: Group) -> Tensor:
    """Log-softmax over the columns of all ranks; a group of one answers with its own."""
    log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    if group.size == 1:
        return log_probs
    own = logits[:, :1].float() - log_probs[:, :1]  # any column tells the log-sum-exp of all
    total = start_all_gather(own, group, dim=1).wait().logsumexp(dim=1, keepdim=True)
    return log_probs.add_(own - total)


@torch.compiler.disable  # what waits on other ranks stays out of compiled graphs
def _loss_with_gradients(hidden: Tensor, weight: Tensor, *, labels: Tensor, loss_mask: Tensor, words: _Words) -> Tensor:
    loss: Tensor = _VocabParallelCrossEntropy.apply(hidden, weight, labels, loss_mask, words)
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, loss_mask: Tensor, words: _Words) -> Tensor:
        real = weight[: words.num_real]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        # fp32 even for bf16 weights: chunks add up here.
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part in _chunks(hidden, words):
            target, mask = words.find(labels[part]), loss_mask[part]
            grad_logits = words.log_probs(hidden[part], weight)
            total -= target.pick(grad_logits, mask)
            grad_logits.exp_().scatter_add_(1, target.column, -target.is_held)
            # The mask goes where a row has H elements, not V.
            local = grad_logits.to(hidden.dtype)
            scale = mask[:, None].to(hidden.dtype)
            torch.mul(local @ real, scale, out=grad_hidden[part])
            _add_product(grad_weight[: words.num_real], local.t(), other=hidden[part] * scale)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return start_all_reduce(total, words.group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        # In place, as the largest tensors of a step; a second backward is an error then, not a wrong gradient.
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return grad_hidden.mul_(scale), grad_weight.mul_(scale), None, None, None


def _chunks(hidden: Tensor, words: _Words) -> list[slice]:
    num_tokens = hidden.shape[0]
    limit = CHUNK_ELEMENTS.get(hidden.device.type, 2**27)
    size = max(MIN_CHUNK_TOKENS, limit // words.num_columns)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _add_product(total: Tensor, left: Tensor, *, other: Tensor) -> None:
    if total.dtype is left.dtype:
        total.addmm_(left, other)
    else:
        total += left @ other
