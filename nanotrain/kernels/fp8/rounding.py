"""Random words of stochastic rounding: functions of seed, sample, position, layer and channel.

    32-bit words   seed -- sample -- position         one word per token, from the stage
                   -- layer -- product -- channel     one word per element of a gradient

A word is a hash of these global numbers, as in dropout (kernels/dropout.py), so a value is rounded
the same way in every layout of tp, cp, dp and pp, and in a recomputation. Sample indices count over
all epochs, so no two steps share words. Rows of experts are numbered in their order on the rank:
a layout of ep or dp has other words there, with the same distribution.

    RoundingWords    the words of the tokens of the microbatch that a stage computes
    LayerKey         the global name of a layer as a word, and the first channel of this rank
    row_words        words of the rows of a gradient
    element_words    words of all elements
"""

import threading
import zlib
from dataclasses import dataclass
from enum import IntEnum

import torch
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


def element_words(
    rows: Tensor, num_channels: int, *, key: LayerKey, rounded_for: RoundedFor
) -> Tensor:
    """[T] words of tokens -> [T, num_channels] words of the elements of a gradient."""
    words = mix_in(mix_in(rows, key.word), int(rounded_for))
    last = key.first_channel + num_channels
    return mix_in(words[:, None], torch.arange(key.first_channel, last, device=rows.device))
