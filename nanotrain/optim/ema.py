"""`--ema-decay`: an exponential moving average of the main params, beside them in every shard.

    ema = decay * ema + (1 - decay) * main        after every step that was not skipped; fp32, begins as the main params

It is stored with the optimizer state, on the device or on the host, and saved as "ema/NAME".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanotrain.optim.state import PartState
from nanotrain.optim.stored import StoredTensor


class WeightAverage:
    """The moving average of the main params of some parts.

    Args:
        parts: with their initial main params.
        decay: at least 0 and below 1; None for no average.
    """

    def __init__(self, parts: Sequence[PartState], decay: float | None) -> None:
        self._parts, self._decay = list(parts if decay is not None else ()), decay or 0.0
        for part in self._parts:
            device, on_host = part.model_params.device, part.host is not None
            part.ema = StoredTensor.zeros(part.part.numel, torch.float32, device=device, on_host=on_host)
        self.restart()

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """Add the main params; `skipped` is a bool scalar on the device, and a skipped step changes nothing."""
        weight = torch.where(skipped, 0.0, 1.0 - self._decay).float()
        for part in self._parts:
            assert part.ema is not None, "allocated above"
            ema, of_part = part.ema.values, weight.to(part.ema.values.device)
            for start, stop in part.chunks():
                ema[start:stop].lerp_(part.main.read(start, stop), of_part)

    def restart(self) -> None:
        """Set the average to the main params, for example after loading a checkpoint without an average."""
        for part in self._parts:
            assert part.ema is not None, "allocated above"
            for start, stop in part.chunks():
                part.ema.write(part.main.read(start, stop), start)
