"""Counter-based dropout: the mask is a hash of indices, not of a random state.

It is equal in every layout and recomputation.

    32-bit words   seed -- sample -- layer and site -- position -- channel, or head, query and key
                          hashed one after the other; the last word is compared with the rate

    sample_words    one word per sample of a microbatch, from the seed and the indices of samples
    mix_in          hash further numbers into words
    keep_factors    0 where dropped, else 1 / (1 - rate)
    dropout         of hidden states; keeps no mask for the backward, which computes it again

Sample indices count over all epochs, so no two steps share a mask. Words are int64 tensors below
2^32, equal on every device. The hash function is the 32-bit finalizer with two multiplications of
C. Wellons ("Prospecting for hash functions", 2018), which has the lowest known bias of its form.
"""

from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.autograd import eager_or_graph

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: consecutive numbers become distant words


def sample_words(seed: int, sample_ids: Tensor) -> Tensor:
    """[B] int64 indices of samples -> [B] words."""
    high = mix_in(torch.full_like(sample_ids, seed & MASK), seed >> 32)
    low = mix_in(high, sample_ids)
    return mix_in(low, sample_ids >> 32)


def mix_in(words: Tensor, numbers: Tensor | int) -> Tensor:
    """Hash integers into 32-bit words; the two tensors broadcast."""
    x = (words + (numbers & MASK) * GOLDEN + 1) & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def keep_factors(words: Tensor, rate: float, *, dtype: torch.dtype) -> Tensor:
    """The factor of each element, from its word."""
    return (words >= _threshold(rate)).to(dtype).mul_(1 / (1 - rate))


def _threshold(rate: float) -> int:
    """The threshold of a rate: an element whose word is below it is dropped."""
    return round(rate * 2**32)


def dropout(x: Tensor, words: Tensor, *, rate: float) -> Tensor:
    """Drop elements of hidden states.

    Args:
        x: [B, S, H].
        words: [B, S], one per token.
        rate: share of the elements that become 0; the others are scaled by 1 / (1 - rate).
    """
    return _dropout_forms(x, words, rate=rate)


def _drop(x: Tensor, words: Tensor, *, rate: float) -> Tensor:
    """Drop and scale.

    Multiplying by a Python number rounds once; a 16-bit factor would be off by up to 2^-9.
    """
    channels = torch.arange(x.shape[-1], device=x.device)
    is_dropped = mix_in(words[..., None], channels) < _threshold(rate)
    scaled = x * (1 / (1 - rate))
    return scaled.masked_fill(is_dropped, 0)


class _Dropout(torch.autograd.Function):
    """Dropout that computes the mask again in the backward, from the random words."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, words: Tensor, rate: float) -> Tensor:
        """Drop elements of x whose random word is below the threshold of the rate."""
        ctx.save_for_backward(words)
        ctx.rate = rate
        return _drop(x, words, rate=rate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Drop the gradients of the same elements."""
        (words,) = ctx.saved_tensors
        return _drop(grads[0], words, rate=ctx.rate), None, None


def _drop_without_mask(x: Tensor, words: Tensor, *, rate: float) -> Tensor:
    out: Tensor = _Dropout.apply(x, words, rate)
    return out


_dropout_forms = eager_or_graph(_drop_without_mask, _drop)
