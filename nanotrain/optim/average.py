"""`WeightAverage`: the moving average of the weights."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from nanotrain.optim.state import PartState
from nanotrain.optim.stored import StoredTensor
from nanotrain.parallel.dp.layout import clip_ranges


class WeightAverage:
    """`--ema-decay`: a moving average of the main params, saved as "ema/NAME".

        ema = decay * ema + (1 - decay) * main

    after every step that was not skipped; in fp32, and initially equal to the main params.

    Args:
        parts: parts with their initial main params.
        decay: factor per step, at least 0 and below 1; None for no average.
    """

    def __init__(self, parts: Sequence[PartState], decay: float | None) -> None:
        self._parts = [] if decay is None else list(parts)
        self._decay = decay or 0.0
        for part in self._parts:
            part.ema = StoredTensor.zeros(
                part.part.numel,
                torch.float32,
                device=part.model_params.device,
                on_host=part.host is not None,
            )
        self.restart()

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """Add the main params, unless the step was skipped (a bool scalar on the device)."""
        weight = torch.where(skipped, 0.0, 1.0 - self._decay).float()
        for part, ema in self._averages():
            for start, stop in part.chunks():
                ema[start:stop].lerp_(part.main.read(start, stop), weight.to(ema.device))

    def restart(self) -> None:
        """Set the average to the main params, as after loading a checkpoint without an average."""
        for part, ema in self._averages():
            for start, stop in part.chunks():
                ema[start:stop].copy_(part.main.read(start, stop))

    def restart_params(self, names: Collection[str]) -> None:
        """Set the averages of some parameters to their main params."""
        for part, ema in self._averages():
            chosen = [entry for entry in part.part.ranges if entry.name in names]
            for start, stop in part.chunks():
                main = part.main.read(start, stop)
                average = ema[start:stop]
                first = part.part.start + start
                for inside in clip_ranges(chosen, start=first, stop=part.part.start + stop):
                    elements = slice(inside.start - first, inside.stop - first)
                    average[elements].copy_(main[elements])

    def _averages(self) -> Iterator[tuple[PartState, Tensor]]:
        for part in self._parts:
            assert part.ema is not None, "allocated in __init__"
            yield part, part.ema.values
