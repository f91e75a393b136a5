"""`--log-straggler`: name the ranks that have been slow for long, on the first rank.

A rank is a straggler once its steps, without waits for other ranks, have taken more than
`straggler_factor` times the median of all ranks for `straggler_duration_s`. It is named once, and
again after it has been as fast as the others.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from nanotrain.comm.collectives import gather_object
from nanotrain.log import get_logger
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport

log = get_logger(__name__)


@dataclass
class SlowTime:
    """How long a rank has been slow without a break."""

    first_step: int
    busy_s: float = 0.0  # of the rank
    median_s: float = 0.0  # of all ranks, in the same steps
    elapsed_s: float = 0.0
    is_named: bool = False

    @property
    def ratio(self) -> float:
        """Time of the rank relative to the median."""
        return self.busy_s / self.median_s if self.median_s else 0.0


class SlowRanks:
    """Finds ranks that stay slower than the median.

    Args:
        factor: multiple of the median above which a step of a rank is slow.
        duration_s: seconds of slow steps in a row after which the rank is named.
    """

    def __init__(self, *, factor: float, duration_s: float) -> None:
        self._factor = factor
        self._duration_s = duration_s
        self._slow: dict[int, SlowTime] = {}

    def add(self, step: int, busy_s: Sequence[float], *, step_time_s: float) -> dict[int, SlowTime]:
        """Add a step; returns the ranks that are stragglers since this step.

        Args:
            step: number of the step.
            busy_s: seconds of each rank without waits for others.
            step_time_s: seconds of the step.
        """
        middle = median(busy_s)
        named = {}
        for rank, seconds in enumerate(busy_s):
            if seconds <= self._factor * middle:
                self._slow.pop(rank, None)
                continue
            slow = self._slow.setdefault(rank, SlowTime(step))
            slow.busy_s += seconds
            slow.median_s += middle
            slow.elapsed_s += step_time_s
            if slow.elapsed_s >= self._duration_s and not slow.is_named:
                slow.is_named = True
                named[rank] = slow
        return named


class StragglerHook(Hook):
    """Logs stragglers, with their hosts.

    Args:
        factor, duration_s: as for `SlowRanks`.
    """

    def __init__(self, *, factor: float, duration_s: float) -> None:
        self._ranks = SlowRanks(factor=factor, duration_s=duration_s)
        self._hosts: list[str] = []  # on the first rank

    def before_training(self, run: Run) -> None:
        self._hosts = gather_object(platform.node(), run.context.control) or []

    def after_read(self, run: Run, report: StepReport) -> None:
        """Warn of ranks that have become stragglers."""
        if not report.busy_s or not self._hosts:
            return
        # times of the step before
        step = report.step - 1
        named = self._ranks.add(step, report.busy_s, step_time_s=report.step_time_s)
        for rank, slow in named.items():
            log.warning(
                "rank %d (%s, host %s) is a straggler: %.1f times the median of the ranks for "
                "%.0f s, since step %d",
                rank,
                run.context.topology.coords_text(rank) or "one rank",
                self._hosts[rank],
                slow.ratio,
                slow.elapsed_s,
                slow.first_step,
            )
