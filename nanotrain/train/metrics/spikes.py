"""The deviation of a loss from the previous ones, and the share of a run's steps that were spikes.

    deviation      (loss - mean) / standard deviation of the last WINDOW losses, in standard deviations
    spike score    share of the steps, after the first MIN_STEPS, that deviate by SPIKE or more

Source: OLMo Team 2024, "2 OLMo 2 Furious", section 3.1: values at least seven standard deviations away from a rolling
average of the last 1000.
"""

import math
from collections import deque

import numpy as np

WINDOW, MIN_STEPS, SPIKE = 1000, 50, 7.0


class SpikeScore:
    """Counts the spikes among losses that are added in order; the count starts at 0 in every process."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._num_steps = self._num_spikes = 0

    def add(self, loss: float) -> tuple[float, float] | None:
        """Add the loss of a step; returns its deviation and the spike score so far, None for the first steps.

        A loss that is not finite has an infinite deviation and does not enter later windows.
        """
        deviation = self._deviation(loss) if len(self._losses) >= MIN_STEPS else None
        if math.isfinite(loss):
            self._losses.append(loss)
        if deviation is None:
            return None
        self._num_steps += 1
        self._num_spikes += abs(deviation) >= SPIKE
        return deviation, self._num_spikes / self._num_steps

    def _deviation(self, loss: float) -> float:
        if not math.isfinite(loss):
            return math.inf
        window = np.fromiter(self._losses, dtype=float)
        mean, spread = float(window.mean()), float(window.std())
        return (loss - mean) / spread if spread else 0.0 if loss == mean else math.copysign(math.inf, loss - mean)
