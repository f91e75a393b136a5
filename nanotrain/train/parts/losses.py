"""Losses in addition to the model's.

MTPLosses      losses of multi-token prediction, which are trained
IndexerLoss    divergence of the indexers of sparse attention
SourceLosses   loss on each corpus of a blend
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
from nanotrain.train.parts.since_logged import SinceLogged


class MTPLosses(StepPart):
    """Scales the losses of multi-token prediction by global token counts, and logs them."""

    def __init__(self, model: BuiltModel) -> None:
        mtp = model.config.model.mtp
        self._tp = model.context.groups["tp"]  # its ranks have equal losses
        self._device = model.context.device
        # on the last stage only
        self._layers = [layer for stage in model.stages.values() for layer in stage.mtp_layers]
        self._num_layers = mtp.num_layers or 0
        self._factor = mtp.loss_scaling_factor
        self._num_tokens: list[int] = []  # target tokens of each layer in this step

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        return model.plan.shape.num_mtp_layers > 0

    def prepare(self, batch: Batch) -> Batch:
        return batch.with_mtp(self._num_layers)

    def counts(self, batches: Sequence[Batch]) -> list[float]:
        """Target tokens of each layer."""
        counts = [0.0] * self._num_layers
        for batch in batches:
            for depth in range(self._num_layers):
                counts[depth] += float(batch.mtp[depth].num_target_tokens)
        return counts

    def context(self, batch: GlobalBatch, counts: Sequence[float]) -> dict[str, Any]:
        """The factors of the summed losses, in the units of the model's summed loss.

        Each layer's loss is a mean over its own target tokens, and the mean over layers is scaled.
        """
        self._num_tokens = [max(round(count), 1) for count in counts]
        factor = self._factor / self._num_layers
        total = max(batch.num_target_tokens, 1)
        return {"mtp_scales": tuple(factor * total / num_tokens for num_tokens in self._num_tokens)}

    def sums(self, *, is_logged: bool) -> Tensor:
        """[layers], the losses of the step; resets them."""
        none = torch.zeros(self._num_layers, dtype=torch.float64, device=self._device)
        sums = torch.cat([layer.loss_sums for layer in self._layers]) if self._layers else none
        for layer in self._layers:
            layer.loss_sums.zero_()
        return self._tp.once(sums)

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        means = [total / count for total, count in zip(sums, self._num_tokens, strict=True)]
        return torch.stack(means)

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        return {"mtp_losses": list(numbers)}


class IndexerLoss(SinceLogged):
    """Logs the divergence of indexers, a mean over layers and tokens since the last logged step."""

    def __init__(self, model: BuiltModel) -> None:
        self._device = model.context.device
        self._indexers = []
        for stage in model.stages.values():
            for module in stage.modules():
                if isinstance(module, IndexerDivergence):
                    self._indexers.append(module)
        self.collected = [indexer.sums for indexer in self._indexers]

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        dsa = model.plan.shape.dsa
        return dsa is not None and bool(dsa.loss_coeff)

    def sums(self, *, is_logged: bool) -> Tensor | None:
        """[2], divergences and tokens since the last logged step; resets them."""
        if not is_logged:
            return None
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        for indexer in self._indexers:
            total += indexer.take_sums()
        return total

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        divergence, num_tokens = numbers
        return {"dsa_indexer_loss": divergence / max(num_tokens, 1.0)}


class SourceLosses(SinceLogged):
    """Logs the mean loss on each corpus since the last logged step."""

    def __init__(self, model: BuiltModel) -> None:
        self._names = source_names(model.dataset)  # in the order of `Batch.source_ids`
        # losses, then target tokens
        self._sums = torch.zeros(
            2, len(self._names), dtype=torch.float64, device=model.context.device
        )
        self.collected = [self._sums]
        for stage in model.stages.values():
            if stage.head is not None:
                # the head adds to the sums in the forward passes of training
                stage.head.source_sums = self._sums

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        return bool(source_names(model.dataset))

    def sums(self, *, is_logged: bool) -> Tensor | None:
        """Losses and tokens of every corpus since the last logged step; resets them."""
        if not is_logged:
            return None
        taken = self._sums.flatten().clone()
        self._sums.zero_()
        return taken

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        """The mean loss of every corpus that had target tokens."""
        losses = numbers[: len(self._names)]
        counts = numbers[len(self._names) :]
        means = {}
        for name, loss, count in zip(self._names, losses, counts, strict=True):
            if count:
                means[name] = loss / count
        return {"source_losses": means}
