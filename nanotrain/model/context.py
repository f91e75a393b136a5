"""Inputs of a forward besides parameters and activations: `BatchContext` of a stage, `LayerContext` of its layers."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.data.batch import Batch
from nanotrain.model.dropout import DropoutContext
from nanotrain.model.rope import Rotary
from nanotrain.parallel.cp.split import local_positions


@dataclass(frozen=True)
class BatchContext:
    """A microbatch with the positions, scales and seed that the step adds."""

    batch: Batch  # the tokens of this rank, [B, S]
    # [S] int64, positions of this rank's tokens in their sequence under context parallelism; None for 0..S-1. Unlike
    # position ids they do not restart with a document.
    sequence_positions: Tensor | None = None
    # factor of one sequence's auxiliary losses in the differentiated loss; loss scale / sequences of the global batch
    # gives their mean over sequences. A tensor where the loss scale is dynamic
    aux_loss_scale: float | Tensor = 0.0
    dropout_seed: int | None = None  # None: nothing is dropped, as in evaluation
    # factors of the summed losses of the layers of multi-token prediction, relative to the summed loss of the model;
    # empty in evaluation, which leaves those layers out
    mtp_scales: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        batch: Batch,
        *,
        cp: Group,
        aux_loss_scale: float | Tensor = 0.0,
        dropout_seed: int | None = None,
        mtp_scales: tuple[float, ...] = (),
    ) -> Self:
        """The context of a batch whose sequences are sharded over a cp group."""
        positions = None
        if cp.size > 1:
            length, device = batch.tokens.shape[1] * cp.size, batch.tokens.device
            positions = local_positions(length, index=cp.index, size=cp.size, device=device)
        return cls(batch, positions, aux_loss_scale, dropout_seed, mtp_scales)

    def dropout(self) -> DropoutContext | None:
        """The random words of dropout; None if nothing is dropped."""
        if self.dropout_seed is None:
            return None
        tokens, positions, sample_ids = self.batch.tokens, self.sequence_positions, self.batch.sample_ids
        assert sample_ids is not None, "dropout needs the indices of the samples"
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return DropoutContext.of(self.dropout_seed, sample_ids, positions=positions)


@dataclass(frozen=True)
class LayerContext:
    """What all layers of a stage share for one microbatch."""

    rotary: Rotary | None = None  # cosines and sines of the positions; None without rotary positions
    window_rotary: Rotary | None = None  # for layers with a window; None if they use `rotary`
    mask: Any = None  # made by `CoreAttention.plan_mask`
    window_mask: Any = None  # the mask of layers with a window
    sequence_positions: Tensor | None = None  # see `BatchContext`
    dropout: DropoutContext | None = None  # None where nothing is dropped
    aux_loss_scale: float | Tensor = 0.0  # see `BatchContext`
    is_padding: bool = False  # see `Batch`
    # tokens_per_expert that a router compares this microbatch with, by router; a recomputed forward reads its own
    balance_counts: dict[Any, Tensor] = field(default_factory=dict)

    def rotary_of(self, *, has_window: bool) -> Rotary | None:
        """The cosines and sines of a layer."""
        return self.window_rotary if has_window and self.window_rotary is not None else self.rotary

    def of_layer(self, layer: int) -> Self:
        """The context with the random words of a layer."""
        return self if self.dropout is None else replace(self, dropout=self.dropout.of_layer(layer))

    def mask_of(self, *, has_window: bool) -> Any:
        """The mask of a layer."""
        return self.window_mask if has_window else self.mask
