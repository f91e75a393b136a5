"""Parts whose numbers are collected over the steps between two logged ones."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nanotrain.train.batches import GlobalBatch
from nanotrain.train.parts.part import StepPart


class SinceLogged(StepPart):
    """A part with tensors that forward passes add to until a step is logged.

    Attributes:
        collected: these tensors of this rank.
    """

    collected: Sequence[Tensor] = ()
    _before: Sequence[Tensor] = ()  # their values before the step

    def context(self, batch: GlobalBatch, counts: Sequence[float]) -> dict[str, Any]:
        """Keep the values before the step; there are no fields."""
        self._before = [tensor.clone() for tensor in self.collected]
        return {}

    def take_back(self) -> None:
        for tensor, before in zip(self.collected, self._before, strict=True):
            tensor.copy_(before)
