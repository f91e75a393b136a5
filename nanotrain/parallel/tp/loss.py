"""`vocab_parallel_cross_entropy`: the loss fused with the output layer, over a sharded vocabulary.

The logits of all tokens would be the largest activation of a training step (vocabulary x tokens, in
fp32). They are computed for one chunk of tokens at a time and not saved: the forward also computes
the gradients of the chunk, and the backward only scales them. Where the gradient of the loss is
known in the forward (`Targets.grad_scale`) the gradients of the logits are scaled there, and their
products with the hidden states are added to the gradient buffer of the weight, without another
[V, H] matrix. Not in fp16, where small gradients would be lost.

Logits are not gathered: each rank normalizes over its shard of the vocabulary, and an all-gather of
one number per token combines the shards:

    rank 0   log-sum-exp over tokens 0..49    a0 --+-- all-gather --> global log-sum-exp
    rank 1   log-sum-exp over tokens 50..99   a1 --+                  = log(e^a0 + e^a1)

One all-reduce at the end sums the losses of the labels, each computed on the rank whose shard
contains the label.

The loss is outside of compiled graphs, so on GPUs a Triton kernel does what the compiler does
elsewhere. Bytes per logit in bf16 between the products, 20 by torch: 2 read, 4 written, 4 + 4 exp,
4 + 2 conversion; 6 by Triton: 2 read for the log-sum-exp, 2 + 2 for the gradient in place. The
kernel's module imports Triton, so it is not imported on a CPU.

    t tokens of a chunk   T tokens   H hidden   V vocabulary   Vp vocabulary with padding
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.comm.autograd import eager
from nanotrain.comm.collectives import start_all_gather, start_all_reduce
from nanotrain.comm.group import Group
from nanotrain.kernels.compiler import runs_triton
from nanotrain.kernels.linear import dgrad, grad_view_of, wgrad, write_wgrad

# Logits per chunk. On the CPU they stay in the cache (measured at V = 8192, H = 384, one core,
# against one chunk: fp32 400 -> 314 ms, bf16 238 -> 132 ms); a GPU is faster with fewer and larger
# matrix products.
CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**28}
# With smaller chunks the sum of [V, H] weight gradients would cost more than the logits save.
MIN_CHUNK_TOKENS = 256


Combine = Callable[[Tensor], Tensor]  # [t, 1] log-sum-exp of the local columns -> of all columns


@dataclass(frozen=True)
class Vocabulary:
    """The columns of the logits."""

    size: int  # V, tokens of the vocabulary without padding
    softcap: float | None = None  # logits are c * tanh(logits / c) (Gemma 2); None: as they are
    scaling: float = 1.0  # they are divided by this before (Granite)

    def cap(self, logits: Tensor) -> Tensor:
        """Scaled and soft-capped logits."""
        if self.scaling != 1.0:
            logits = logits / self.scaling
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


@dataclass(frozen=True)
class TokenGroups:
    """Groups of tokens, whose losses are also summed per group: a corpus, or a row of a task."""

    ids: Tensor  # [T] int64, the group of each token
    # [2, groups] fp64: sums of losses over the labels of this rank's shard; and sums of the mask in
    # training, on the first tp rank, or in evaluation the number of the shard's labels that are the
    # most likely tokens
    sums: Tensor

    def add(self, losses: Tensor, counts: Tensor, *, chunk: slice) -> None:
        """Add the losses [t] and the counts [t] of a chunk."""
        self.sums.index_add_(1, self.ids[chunk], torch.stack([losses, counts]).double())


@dataclass(frozen=True)
class Targets:
    """Labels and their weights in the loss."""

    labels: Tensor  # [T] int64 below V
    loss_mask: Tensor  # [T] fp32, the weight of each token's loss (0 excludes it)
    groups: TokenGroups | None = None  # None if losses are not summed per group
    # the gradient of the returned sum, where it is known in the forward
    grad_scale: float | Tensor | None = None


@eager  # collectives stay out of compiled graphs
def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    *,
    targets: Targets,
    vocabulary: Vocabulary,
    group: Group,
    bias: Tensor | None = None,
) -> Tensor:
    """The sum over unmasked tokens of -log softmax(hidden @ weight.T + bias)[label].

    Padding is not part of the softmax.

    Args:
        hidden: [T, H], replicated over the group; its gradient is this rank's partial sum.
        weight: [Vp/tp, H], the local shard; rows from V on are padding and get a zero gradient.
        targets: labels and mask.
        vocabulary: V, scaling and softcap of the logits.
        group: shards the vocabulary.
        bias: [Vp/tp], the local shard; None for none.

    Returns:
        fp32 scalar, the same on every rank of the group.
    """
    shard = _VocabShard.of(weight, vocabulary, group=group)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _VocabParallelCrossEntropy.apply(hidden, weight, bias, targets, shard)
        return loss
    return _evaluate(hidden, weight, bias=bias, targets=targets, shard=shard)


def _evaluate(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None,
    targets: Targets,
    shard: "_VocabShard",
) -> Tensor:
    """The loss without gradients."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for chunk in _token_chunks(hidden, shard, is_training=False):
        target = shard.locate(targets.labels[chunk])
        mask = targets.loss_mask[chunk]
        log_probs = shard.log_probs(hidden[chunk], weight, bias=bias)
        picked = target.pick(log_probs, mask)
        total -= picked.sum()
        if targets.groups is not None:
            local_highest = log_probs.amax(dim=1, keepdim=True)
            highest = start_all_gather(local_highest, shard.group, dim=1).wait().amax(dim=1)
            greedy = (picked >= highest).float()
            targets.groups.add(-picked, greedy * target.local_mask[:, 0] * mask, chunk=chunk)
        del log_probs  # before the logits of the next chunk
    return start_all_reduce(total, shard.group).wait()


@dataclass(frozen=True)
class _Target:
    """The position of each label in the local logits."""

    column: Tensor  # [t, 1] int64, arbitrary where the label is in another shard
    local_mask: Tensor  # [t, 1] fp32, 1 where the label is in this shard, else 0

    def pick(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        """[t], the log-probabilities of the local labels, times the mask."""
        picked = log_probs.gather(1, self.column) * self.local_mask
        return picked[:, 0].mul_(mask)


@dataclass(frozen=True)
class _VocabShard:
    """The tokens of the vocabulary in the local weight."""

    group: Group  # shards the vocabulary
    start: int  # the first token id
    num_tokens: int  # rows that are not padding; at least 1, see `is_padding`
    # `num_tokens` of the largest shard, so that all ranks split their tokens into the same chunks
    max_tokens: int
    vocabulary: Vocabulary
    # all rows are padding: one row takes part, with a very low logit, and contributes nothing
    is_padding: bool

    @classmethod
    def of(cls, weight: Tensor, vocabulary: Vocabulary, *, group: Group) -> "_VocabShard":
        """The shard of this rank; `weight` [V / tp, H] is padded to equal rows per rank."""
        start = group.index * weight.shape[0]
        num_tokens = min(weight.shape[0], vocabulary.size - start)
        return cls(
            group=group,
            start=start,
            num_tokens=max(1, num_tokens),
            max_tokens=min(weight.shape[0], vocabulary.size),
            vocabulary=vocabulary,
            is_padding=num_tokens < 1,
        )

    def locate(self, labels: Tensor) -> _Target:
        """[t] int64 labels -> their positions in the local logits."""
        column = labels[:, None] - self.start
        is_local = (column >= 0) & (column < self.num_tokens)
        if self.is_padding:
            is_local = torch.zeros_like(is_local)
        return _Target(column.clamp(0, self.num_tokens - 1), is_local.float())

    def logits(self, hidden: Tensor, weight: Tensor, *, bias: Tensor | None) -> Tensor:
        """[t, H] -> [t, num_tokens], scaled and soft-capped."""
        used_bias = None if bias is None else bias[: self.num_tokens]
        logits = self.vocabulary.cap(F.linear(hidden, weight[: self.num_tokens], used_bias))
        if self.is_padding:
            logits.fill_(torch.finfo(logits.dtype).min / 2)
        return logits

    def log_probs(self, hidden: Tensor, weight: Tensor, *, bias: Tensor | None) -> Tensor:
        """[t, H] -> [t, num_tokens] fp32, normalized over the global vocabulary."""
        return normalize(self.logits(hidden, weight, bias=bias), self.combine)

    def combine(self, local: Tensor) -> Tensor:
        """[t, 1] log-sum-exp over this shard -> over all shards."""
        if self.group.size == 1:
            return local
        return start_all_gather(local, self.group, dim=1).wait().logsumexp(dim=1, keepdim=True)

    def slope(self, logits: Tensor) -> Tensor | float | None:
        """The derivative of scaled and soft-capped logits by the products; None if it is 1."""
        cap = self.vocabulary.softcap
        factor = 1 / self.vocabulary.scaling
        if cap is None or self.is_padding:
            return None if factor == 1.0 else factor
        slope = 1 - (logits.float() / cap).square()
        return slope * factor


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Head and loss chunk by chunk; the forward already computes both gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        shard: _VocabShard,
    ) -> Tensor:
        """Sum of the losses of hidden states [T, H]; only one chunk of logits exists at once."""
        used = weight[: shard.num_tokens]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        buffer = _Buffer.of(weight, targets)
        # fp32 also for bf16 weights, as it accumulates over chunks
        shape = weight.shape if needs_wgrad and buffer is None else (0, 0)
        grad_weight = torch.zeros(shape, dtype=torch.float32, device=weight.device)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for chunk in _token_chunks(hidden, shard):
            target = shard.locate(targets.labels[chunk])
            mask = targets.loss_mask[chunk]
            logits = shard.logits(hidden[chunk], weight, bias=bias)
            slope = shard.slope(logits)
            log_probs, grad_logits = softmax_gradient(
                logits,
                column=target.column,
                local_mask=target.local_mask,
                combine=shard.combine,
                scale=None if buffer is None else mask[:, None] * buffer.scale,
            )
            del logits  # as large as the gradient
            log_probs = log_probs * mask
            total -= log_probs.sum()
            if targets.groups is not None:
                counts = shard.group.once(mask)
                targets.groups.add(-log_probs, counts, chunk=chunk)
            if slope is not None:
                grad_logits *= slope
            if grad_bias is not None:
                weights = mask if buffer is None else torch.ones_like(mask)
                grad_bias[: shard.num_tokens] += weights @ grad_logits.float()
            cast_grad = grad_logits.to(hidden.dtype)
            if buffer is not None:
                if needs_dgrad:
                    torch.mm(cast_grad, used, out=grad_hidden[chunk])
                buffer.add(cast_grad, hidden[chunk])
            else:  # the mask multiplies rows of H elements, not of V
                scale = mask[:, None].to(hidden.dtype)
                if needs_dgrad:
                    torch.mul(dgrad(cast_grad, used), scale, out=grad_hidden[chunk])
                if needs_wgrad:
                    wgrad(cast_grad, hidden[chunk] * scale, add_to=grad_weight[: shard.num_tokens])
            del grad_logits, cast_grad  # before the logits of the next chunk
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.param = weight
        ctx.is_complete = buffer is not None
        return start_all_reduce(total, shard.group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the forward, times the gradient of the loss."""
        # In place, as these are the largest tensors of a step; autograd refuses a second backward.
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        if ctx.is_complete:
            return grad_hidden, None, _cast(grad_bias, ctx.param), None, None
        scale = grads[0]
        grad_hidden.mul_(scale)
        if grad_bias is not None:
            grad_bias = _cast(grad_bias.mul_(scale), ctx.param)
        if not ctx.needs_input_grad[1]:
            return grad_hidden, None, grad_bias, None, None
        if _write_grad(grad_weight, scale, param=ctx.param):
            return grad_hidden, None, grad_bias, None, None
        return grad_hidden, grad_weight.mul_(scale), grad_bias, None, None


def _cast(grad: Tensor | None, param: Tensor) -> Tensor | None:
    """A gradient in the dtype of a parameter."""
    return None if grad is None else grad.to(param.dtype)


@dataclass
class _Buffer:
    """The gradient buffer of the weight, written in the forward pass."""

    view: Tensor  # [Vp/tp, H] fp32
    has_grads: bool  # whether it holds gradients of this step
    scale: float | Tensor  # the gradient of the loss

    @classmethod
    def of(cls, weight: Tensor, targets: Targets) -> "_Buffer | None":
        """The buffer, if gradients can be written to it in the forward pass."""
        scale = targets.grad_scale
        view = grad_view_of(weight)
        if scale is None or view is None:
            return None
        if view.dtype is not torch.float32 or weight.dtype is torch.float16:
            return None
        target = view.start_write_ahead()
        if target is None:
            return None
        grad_view, has_grads = target
        return cls(grad_view, has_grads, scale)

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Add the weight gradient of a chunk, from [t, num_tokens] and [t, H]."""
        num_tokens = grad_logits.shape[1]
        write_wgrad(grad_logits, hidden, out=self.view[:num_tokens], adds=self.has_grads)
        if not self.has_grads:
            self.view[num_tokens:] = 0.0
        self.has_grads = True


def _write_grad(grad_weight: Tensor, scale: Tensor, *, param: Tensor) -> bool:
    """Write a scaled gradient to the gradient buffer; False if it cannot be written now."""
    view = grad_view_of(param)
    if view is None or view.dtype is not grad_weight.dtype:
        return False
    target = view.start_write()
    if target is None:
        return False
    buffer, has_grads = target
    if has_grads:
        buffer.addcmul_(grad_weight, scale)
    else:
        torch.mul(grad_weight, scale, out=buffer)
    return True


def chunk_tokens(columns: int, *, device: str, is_training: bool) -> int:
    """Tokens of a chunk with `columns` logits per token.

    In evaluation GPUs store logits and fp32 probabilities, so chunks are half as large.
    """
    elements = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"])
    if not is_training and device != "cpu":
        elements //= 2
    return max(MIN_CHUNK_TOKENS, elements // columns)


def _token_chunks(hidden: Tensor, shard: _VocabShard, *, is_training: bool = True) -> list[slice]:
    """The tokens of each chunk."""
    num_tokens = hidden.shape[0]
    size = chunk_tokens(shard.max_tokens, device=hidden.device.type, is_training=is_training)
    chunks = []
    for start in range(0, num_tokens, size):
        chunks.append(slice(start, min(start + size, num_tokens)))
    return chunks


def softmax_gradient(
    logits: Tensor,
    *,
    column: Tensor,
    local_mask: Tensor,
    combine: Combine,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The log-probability of each label, and the gradient of its negative by the logits.

    Args:
        logits: [t, V]; may be overwritten.
        column: [t, 1] int64, position of the label, arbitrary where it is in another shard.
        local_mask: [t, 1] fp32, 1 where the label is in this shard, else 0.
        combine: [t, 1] log-sum-exp of the local columns -> of all columns.
        scale: [t, 1] fp32, factors of the gradient; None for 1.

    Returns:
        [t] fp32, 0 where the label is not local; and [t, V], fp32 or in the memory of the logits.
    """
    compute = _softmax_gradient_by_triton if runs_triton(logits) else _softmax_gradient_by_torch
    return compute(logits, column=column, local_mask=local_mask, combine=combine, scale=scale)


def _softmax_gradient_by_torch(
    logits: Tensor, *, column: Tensor, local_mask: Tensor, combine: Combine, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`softmax_gradient` by torch; the gradient is fp32."""
    log_probs = normalize(logits, combine)
    picked = log_probs.gather(1, column) * local_mask
    gradient = log_probs.exp_().scatter_add_(1, column, -local_mask)
    if scale is not None:
        gradient.mul_(scale)
    return picked[:, 0], gradient


def _softmax_gradient_by_triton(
    logits: Tensor, *, column: Tensor, local_mask: Tensor, combine: Combine, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`softmax_gradient` by Triton; the gradient overwrites the logits."""
    from nanotrain.kernels import triton_softmax

    logsumexp = combine(triton_softmax.row_logsumexp(logits))
    log_probs = logits.gather(1, column).float() - logsumexp
    picked = log_probs * local_mask
    gradient = triton_softmax.softmax_gradient_(
        logits,
        logsumexp=logsumexp,
        scale=torch.ones_like(local_mask) if scale is None else scale,
        column=column,
        local_mask=local_mask,
    )
    return picked[:, 0], gradient


def normalize(logits: Tensor, combine: Combine) -> Tensor:
    """Log-softmax over the columns of all ranks: [t, V] -> [t, V] fp32."""
    log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    local = logits[:, :1].float() - log_probs[:, :1]  # the local log-sum-exp, from any column
    total = combine(local)
    if total is local:  # one rank
        return log_probs
    return log_probs.add_(local - total)
