"""Losses besides that of the model: of multi-token prediction, of indexers, and on each corpus of a
blend.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanotrain.data.batch import Batch
from nanotrain.data.build import source_names
from nanotrain.model.dsa import IndexerDivergence
from nanotrain.optim.distributed import Update
from nanotrain.train.batches import GlobalBatch
from nanotrain.train.parts.part import BuiltModel, StepPart


class MTPLosses(StepPart):
    """The losses of multi-token prediction: scaled in the forward pass by global token counts, and
    reported.
    """

    def __init__(self, model: BuiltModel) -> None:
        mtp, context = model.config.model.mtp, model.context
        # the ranks of tp have equal losses
        self._tp, self._device = context.groups["tp"], context.device
        # of the last stage
        self._layers = [layer for stage in model.stages.values() for layer in stage.mtp_layers]
        self._num_layers, self._factor = mtp.num_layers or 0, mtp.loss_scaling_factor
        self._num_tokens: list[int] = []  # target tokens of each layer in this step

    def prepare(self, batch: Batch) -> Batch:
        return batch.with_mtp(self._num_layers)

    def counts(self, batches: Sequence[Batch]) -> list[float]:
        """Target tokens of each layer."""
        depths = range(self._num_layers)
        return [
            sum(float(batch.mtp[depth].num_target_tokens) for batch in batches) for depth in depths
        ]

    def context(self, batch: GlobalBatch, counts: Sequence[float]) -> dict[str, Any]:
        """The factors of the summed losses, in the units of the model's summed loss.

        Each layer's loss is a mean over its own target tokens, and the mean over layers is scaled.
        """
        self._num_tokens = [max(round(count), 1) for count in counts]
        factor, total = self._factor / self._num_layers, max(batch.num_target_tokens, 1)
        return {"mtp_scales": tuple(factor * total / num_tokens for num_tokens in self._num_tokens)}

    def sums(self, *, is_logged: bool) -> Tensor:
        none = torch.zeros(self._num_layers, dtype=torch.float64, device=self._device)
        sums = torch.stack([layer.loss_sum for layer in self._layers]) if self._layers else none
        for layer in self._layers:
            layer.loss_sum.zero_()
        return sums if self._tp.is_first else none

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        return torch.stack(
            [total / num_tokens for total, num_tokens in zip(sums, self._num_tokens, strict=True)]
        )

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        return {"mtp_losses": list(numbers)}


class IndexerLoss(StepPart):
    """The mean divergence of indexers over layers and tokens, since the last logged step; without
    its coefficient.
    """

    def __init__(self, model: BuiltModel) -> None:
        self._device = model.context.device
        modules = (module for stage in model.stages.values() for module in stage.modules())
        self._sums = [module.sums for module in modules if isinstance(module, IndexerDivergence)]

    def sums(self, *, is_logged: bool) -> Tensor | None:
        if not is_logged:
            return None
        # tp ranks count equal divergences
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        for sums in self._sums:
            total += sums
            sums.zero_()
        return total

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        return {"dsa_indexer_loss": numbers[0] / max(numbers[1], 1.0)}


class SourceLosses(StepPart):
    """The mean loss on each corpus since the last logged step."""

    def __init__(self, model: BuiltModel) -> None:
        self._names = source_names(model.dataset)  # in the order of `Batch.source_ids`
        # losses, target tokens
        self._sums = torch.zeros(
            2, len(self._names), dtype=torch.float64, device=model.context.device
        )
        for stage in model.stages.values():
            if stage.head is not None:  # which adds to the sums in the forward passes of training
                stage.head.source_sums = self._sums

    def sums(self, *, is_logged: bool) -> Tensor | None:
        if not is_logged:
            return None
        taken = self._sums.flatten().clone()
        self._sums.zero_()
        return taken

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        """The mean loss of every corpus that had target tokens."""
        sums, tokens = numbers[: len(self._names)], numbers[len(self._names) :]
        means = {
            name: loss / count
            for name, loss, count in zip(self._names, sums, tokens, strict=True)
            if count
        }
        return {"source_losses": means}
