"""Random words of stochastic rounding: functions of seed, sample, position, layer and channel.

    32-bit words   seed -- sample -- position         one word per token, from the stage
                   -- layer -- product -- channel     one word per element of a gradient

A word is a hash of these global numbers, as in dropout (kernels/dropout.py), so a value is rounded
the same way in every layout of tp, cp, dp and pp, and in a recomputation. Sample indices count over
all epochs, so no two steps share words. Rows of experts are numbered in their order on the rank:
a layout of ep or dp has other words there, with the same distribution. So are
rows of layers that tp ranks replicate, where sequence parallelism shards their tokens.

    RoundingWords    the words of the tokens of the microbatch that a stage computes
    LayerKey         the global name of a layer as a word, and the first channel of this rank
    row_words        words of the rows of a gradient
    element_words    words of all elements, as one word per token
"""

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels.dropout import MASK, mix_in, sample_words

STREAM = 0x4E564650  # keeps the words apart from the words of dropout


class RoundedFor(IntEnum):
    """The product that a gradient is rounded for."""

    DGRAD = 0
    WGRAD = 1


@dataclass(frozen=True)
class LayerKey:
    """A layer in the random words of its gradients."""

    word: int = 0  # a hash of the global name
    first_channel: int = 0  # global number of the first output of this rank

    @classmethod
    def of(cls, name: str, *, first_channel: int) -> "LayerKey":
        """The key of a parameter by its global name."""
        return cls(zlib.crc32(name.encode()), first_channel)


class RoundingWords(threading.local):
    """The words of the tokens of one microbatch, per thread.

    Layers read them in their forward pass and keep them for their backward pass.
    """

    def __init__(self) -> None:
        self.tokens: Tensor | None = None  # [B, S] int64; None outside of a stage

    def start(self, seed: int, *, sample_ids: Tensor, positions: Tensor) -> None:
        """Begin a microbatch.

        Args:
            seed: seed of the run.
            sample_ids: [B] int64, indices of the samples.
            positions: [S] int64, positions of this rank's tokens in their sequence.
        """
        samples = sample_words(seed ^ STREAM, sample_ids)
        self.tokens = mix_in(samples[:, None], positions)


def row_words(num_rows: int, tokens: Tensor | None, *, device: torch.device) -> Tensor:
    """[num_rows] int64, the words of the tokens; of numbers where the rows are other tokens."""
    if tokens is not None and tokens.numel() == num_rows:
        return tokens.flatten()
    return numbered_words(num_rows, tokens, device=device)


def numbered_words(num_rows: int, tokens: Tensor | None, *, device: torch.device) -> Tensor:
    """[num_rows] int64, words of the numbers of rows, and of the tokens of the microbatch."""
    rows = torch.arange(num_rows, device=device)
    if tokens is None:
        return mix_in(torch.zeros_like(rows), rows)
    microbatch = tokens.sum() & MASK
    return mix_in(microbatch.expand(num_rows), rows)


@dataclass(frozen=True)
class ElementWords:
    """The words of the elements of a gradient [T, channels]."""

    rows: Tensor  # [T] int64, of tokens in a layer and product
    first_channel: int

    def expand(self, num_channels: int) -> Tensor:
        """[T, num_channels] int64."""
        last = self.first_channel + num_channels
        channels = torch.arange(self.first_channel, last, device=self.rows.device)
        return mix_in(self.rows[:, None], channels)

    def padded(self, unit: int) -> Self:
        """The words of tokens and of padding, word 0, up to a multiple of `unit`."""
        return replace(self, rows=F.pad(self.rows, (0, -len(self.rows) % unit)))

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """The words of consecutive tokens."""
        return [replace(self, rows=rows) for rows in self.rows.split(list(sizes))]


def element_words(rows: Tensor, *, key: LayerKey, rounded_for: RoundedFor) -> ElementWords:
    """The words of the elements of a gradient, from the words [T] of its tokens."""
    words = mix_in(mix_in(rows, key.word), int(rounded_for))
    return ElementWords(words, key.first_channel)
