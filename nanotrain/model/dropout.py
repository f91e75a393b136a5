"""Dropout in the layers: the random words of a microbatch, a layer and a place in the layer.

    embedding      after the word embeddings                        rate hidden_dropout
    weights        of the attention                                 attention_dropout
    attention      output of the attention                          hidden_dropout
    mlp            output of the MLP or the experts                 hidden_dropout

Outputs are dropped before the residual sum, and before a norm of them (`--norm-placement post` or `sandwich`).

A word is a 32-bit hash of the seed, the sample, the layer, the place and the position; see kernels/dropout.py.

    B batch   S sequence   H hidden
"""

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from nanotrain.kernels.dropout import dropout, mix_in, sample_words
from nanotrain.parallel.tp.tensor_parallel import TensorParallel


class DropoutPlace(IntEnum):
    """Where in a layer elements are dropped."""

    embedding = 0
    weights = 1
    attention = 2
    mlp = 3


@dataclass(frozen=True)
class DropoutContext:
    """The random words and the positions of a microbatch."""

    words: Tensor  # [B] int64, one per sample
    positions: Tensor  # [S] int64, of this rank's tokens in their sequence
    layer_words: Tensor | None = None  # [places, B] int64, of one layer; None for the context of all layers

    @classmethod
    def of(cls, seed: int, sample_ids: Tensor, *, positions: Tensor) -> "DropoutContext":
        """The words of these samples [B] int64 in a run with this seed."""
        return cls(sample_words(seed, sample_ids), positions)

    def of_layer(self, layer: int) -> "DropoutContext":
        """The context with the words of a layer, computed outside of compiled graphs.

        A graph would take the number of the layer as a constant: one graph per layer, and none after the eighth.
        """
        first, num_places = layer * len(DropoutPlace), len(DropoutPlace)
        numbers = torch.arange(first, first + num_places, device=self.words.device)
        return replace(self, layer_words=mix_in(self.words, numbers[:, None]))

    def words_of(self, layer: int, place: DropoutPlace) -> Tensor:
        """The words [B] of a place in a layer."""
        if self.layer_words is not None:
            return self.layer_words[int(place)]
        return mix_in(self.words, layer * len(DropoutPlace) + place)


@dataclass(frozen=True)
class HiddenDropout:
    """Dropout of the hidden states at one place."""

    rate: float
    layer: int
    place: DropoutPlace
    tensor_parallel: TensorParallel

    def __call__(self, x: Tensor, context: DropoutContext | None) -> Tensor:
        """[B, S or S/tp, H] -> the same; without a context, as in evaluation, nothing is dropped."""
        if context is None or self.rate == 0:
            return x
        positions = self.tensor_parallel.local_slice(context.positions[None])
        words = mix_in(context.words_of(self.layer, self.place)[:, None], positions)
        return dropout(x, words, rate=self.rate)
