"""Attention of some queries to some of their keys, in a form that can be put together.

Softmax over all keys follows from softmax over parts of them if each part also tells its log-sum-exp:

    lse = log(exp(lse_1) + exp(lse_2))        out = out_1 * exp(lse_1 - lse) + out_2 * exp(lse_2 - lse)

and the gradients of a part follow from the whole's `out` and `lse` with no further word from the other parts.

    Block             queries and the keys at hand
    Attended          what they make of them; `Running` puts parts together
    attend_block      forward of one block            block_gradients     backward
    KERNELS           torch's fused operations by device; the written-out form where there is none

Milakov and Gimelshein, "Online normalizer calculation for softmax"; Dao, "FlashAttention-2", section 3.1.

    B batch   N query heads   G key/value heads   Q queries   K keys   D, Dv widths of a head
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Queries and the keys and values they look at.

    Args:
        query: [B, N, Q, D].
        key: [B, G, K, D].
        value: [B, G, K, Dv].
        mask: [B or 1, 1, Q, K] bool, True where a query may see a key; a row may be all False. None for no mask.
        is_causal: query i sees keys 0..i (Q equals K); only without a mask.
        scale: of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float


@dataclass(frozen=True)
class Attended:
    """`out` [B, N, Q, Dv], in the queries' dtype, and `lse` [B, N, Q], fp32 (fp64 for fp64)."""

    out: Tensor
    lse: Tensor

    def rows(self, rows: slice) -> "Attended":
        """That of the queries in `rows`."""
        return Attended(self.out[:, :, rows], self.lse[:, :, rows])


@dataclass(frozen=True)
class Gradients:
    """Of a block's query [B, N, Q, D], key [B, G, K, D] and value [B, G, K, Dv], to be added up in `sum_dtype`."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Kernel:
    """Forward and backward for equally many heads of one width on both sides."""

    attend: Callable[[Block], Attended]
    gradients: Callable[..., Gradients]


class Running:
    """Attention to the keys seen so far; the first part must leave no query without a key."""

    def __init__(self, first: Attended) -> None:
        self.out, self.lse = first.out.to(sum_dtype(first.out)), first.lse.clone()

    def add(self, part: Attended, rows: slice) -> None:
        """Take in further keys that the queries in `rows` see."""
        out, lse = self.out[:, :, rows], self.lse[:, :, rows]
        new = torch.logaddexp(lse, part.lse)
        out.mul_((lse - new).exp_()[..., None]).addcmul_(part.out.to(out.dtype), (part.lse - new).exp_()[..., None])
        lse.copy_(new)


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which parts are summed."""
    return torch.promote_types(tensor.dtype, torch.float32)


def attend_block(block: Block) -> Attended:
    """The attention of a block's queries to its keys alone.

    A query that sees no key gets a log-sum-exp so low that its output, of whatever finite value, weighs nothing.
    """
    attended = _kernel(block).attend(_evened(block))
    return replace(attended, out=attended.out[..., : block.value.shape[-1]])


def block_gradients(block: Block, whole: Attended, *, grad: Tensor) -> Gradients:
    """The part of the gradients that comes from this block.

    Args:
        block: as in the forward.
        whole: of the block's queries with all the keys that they see.
        grad: [B, N, Q, Dv], the gradient of `whole.out`.
    """
    evened = _evened(block)
    out, grad = (_widened(x, evened.value.shape[-1]) for x in (whole.out, grad))
    found = _kernel(block).gradients(evened, replace(whole, out=out), grad=grad)
    groups, width, value_width = block.key.shape[1], block.key.shape[-1], block.value.shape[-1]
    return Gradients(
        found.query[..., :width],
        _summed_over_repeats(found.key, groups)[..., :width],
        _summed_over_repeats(found.value, groups)[..., :value_width],
    )


def _kernel(block: Block) -> Kernel:
    has_two_bytes = block.query.dtype.itemsize == 2
    return KERNELS.get((block.query.device.type, block.mask is not None, has_two_bytes), WRITTEN_OUT)


def _evened(block: Block) -> Block:
    """The block with equally many heads on both sides, all of one width that CUDA's kernel takes.

    Heads are repeated and widened by zeros, which change neither scores nor outputs.
    """
    repeats = block.query.shape[1] // block.key.shape[1]
    key, value = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (block.key, block.value))
    width = -(-max(key.shape[-1], value.shape[-1]) // 8) * 8
    query, key, value = (_widened(x, width) for x in (block.query, key, value))
    return replace(block, query=query, key=key, value=value)


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _summed_over_repeats(grad: Tensor, groups: int) -> Tensor:
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(2, dtype=sum_dtype(grad))


def _bias(block: Block) -> Tensor | None:
    """The mask as what is added to scores: finite, since a row of -inf has a log-sum-exp of 0 in torch's kernel."""
    if block.mask is None:
        return None
    unseen = torch.finfo(block.query.dtype).min / 2
    return torch.zeros_like(block.mask, dtype=block.query.dtype).masked_fill_(~block.mask, unseen)


def _attend_cpu(block: Block) -> Attended:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        block.query, block.key, block.value, 0.0, block.is_causal, attn_mask=_bias(block), scale=block.scale
    )
    return Attended(out, lse)


def _gradients_cpu(block: Block, whole: Attended, *, grad: Tensor) -> Gradients:
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad,
        block.query,
        block.key,
        block.value,
        whole.out,
        whole.lse,
        0.0,
        block.is_causal,
        attn_mask=_bias(block),
        scale=block.scale,
    )
    return Gradients(*found)


def _attend_cuda(block: Block) -> Attended:
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        block.query, block.key, block.value, 0.0, block.is_causal, scale=block.scale
    )
    return Attended(found[0], found[1])


def _gradients_cuda(block: Block, whole: Attended, *, grad: Tensor) -> Gradients:
    # The state of the random generator only matters with dropout.
    seed, offset = (torch.zeros(shape, dtype=torch.uint64, device=grad.device) for shape in ((2,), ()))
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad,
        block.query,
        block.key,
        block.value,
        whole.out.contiguous(),
        whole.lse.contiguous(),
        None,
        None,
        block.query.shape[2],
        block.key.shape[2],
        0.0,
        block.is_causal,
        seed,
        offset,
        scale=block.scale,
    )
    return Gradients(*found)


def _scores(block: Block) -> Tensor:
    """[B, N, Q, K], of low but finite value where a query may not look."""
    dtype = sum_dtype(block.query)
    scores = (block.query.to(dtype) @ block.key.to(dtype).mT) * block.scale
    mask = torch.ones_like(scores, dtype=torch.bool).tril() if block.is_causal else block.mask
    return scores if mask is None else scores.masked_fill(~mask, torch.finfo(dtype).min / 2)


def _attend_written_out(block: Block) -> Attended:
    scores = _scores(block)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ block.value.to(scores.dtype)
    return Attended(out.to(block.query.dtype), lse)


def _gradients_written_out(block: Block, whole: Attended, *, grad: Tensor) -> Gradients:
    weights = (_scores(block) - whole.lse[..., None]).exp()
    query, key, value, out, grad = (x.to(weights.dtype) for x in (block.query, block.key, block.value, whole.out, grad))
    # softmax's derivative; sum(grad * out) is the same as the sum over *all* keys of weight times its gradient
    by_score = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) * block.scale
    return Gradients(by_score @ key, by_score.mT @ query, weights.mT @ grad)


WRITTEN_OUT = Kernel(_attend_written_out, _gradients_written_out)
_CPU, _CUDA = Kernel(_attend_cpu, _gradients_cpu), Kernel(_attend_cuda, _gradients_cuda)
# by device, whether there is a mask, and whether numbers have two bytes: CUDA's kernel takes neither masks nor fp32
KERNELS = {
    **{("cpu", masked, narrow): _CPU for masked in (False, True) for narrow in (False, True)},
    ("cuda", False, True): _CUDA,
}
