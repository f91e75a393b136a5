"""Fewer points for a chart, without losing a spike; and a smoothed curve."""

import numpy as np


def keep_extremes(values: np.ndarray, max_points: int) -> np.ndarray:
    """The indices to draw: of each of equal bins the first, the smallest, the largest and the last finite value.

    A spike of one step stays visible at its own step, whatever the number of steps.

    Args:
        values: [n], with NaN where there is no value; all such points are dropped.
        max_points: upper bound of the number of indices; at least 4.

    Returns:
        [m] int64, ascending, m <= max_points.

    >>> keep_extremes(np.array([0.0, 0, 9, 0, 0, 0, 0, 0, 0, -5, 0, 0]), 4).tolist()
    [0, 2, 9, 11]
    """
    present = np.flatnonzero(np.isfinite(values))
    if len(present) <= max_points:
        return present
    kept: list[int] = []
    for part in np.array_split(present, max_points // 4):
        low, high = part[np.argmin(values[part])], part[np.argmax(values[part])]
        kept += sorted({int(part[0]), int(low), int(high), int(part[-1])})
    return np.array(kept)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """An exponential moving average whose weights fall to 1/e within `window` values; NaN is passed over.

    >>> smooth(np.array([1.0, 1.0, 1.0]), 10).tolist()
    [1.0, 1.0, 1.0]
    """
    decay = np.exp(-1.0 / max(1, window))
    out, total, weight = np.empty(len(values)), 0.0, 0.0
    for i, value in enumerate(values):
        if np.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1.0
        out[i] = total / weight if weight else np.nan
    return out
