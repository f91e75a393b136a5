"""Metrics for the experiment trackers of `nanotrain/train/trackers`, on the first rank.

A run that is started again, also in another layout, continues its curves.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nanotrain.log import get_logger
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport
from nanotrain.train.trackers.table import TRACKERS, enabled_trackers
from nanotrain.train.trackers.tracker import Tracker

log = get_logger(__name__)


class TrackHook(Hook):
    """Writes the metrics of every step to the trackers that the `train` section enables.

    A tracker that fails is a warning and left out from then on: training does not depend on it.
    """

    def __init__(self) -> None:
        self._trackers: dict[str, Tracker] = {}

    def begin_writing(self, run: Run, *, step: int) -> None:
        """Open the trackers on the first rank."""
        if not run.context.control.is_first:
            return
        for name in enabled_trackers(run.config.train):
            with self._without_it(name):
                self._trackers[name] = TRACKERS[name].open(run)

    def after_rollback(self, run: Run, report: StepReport) -> None:
        """Start again at the step that the run went back to."""
        self.close(failed=False)
        self.begin_writing(run, step=run.state.step)

    def close(self, *, failed: bool) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._without_it(name):
                tracker.close(failed=failed)

    def after_read(self, run: Run, report: StepReport) -> None:
        """Write the metrics of the step to every tracker."""
        if not self._trackers:
            return
        values = _flat_metrics(report.to_json())
        for name, tracker in list(self._trackers.items()):
            with self._without_it(name):
                tracker.write(report.step, values)

    @contextmanager
    def _without_it(self, name: str) -> Iterator[None]:
        """Go on without a tracker that fails in the block, with whatever error of its package."""
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            log.warning(
                "training goes on without %s, metrics.jsonl has every step: %s", name, error
            )


def _flat_metrics(fields: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a row of metrics.jsonl by flat names, and the tokens per expert by router.

    >>> _flat_metrics({"step": 3, "loss": 2.0, "timers": {"data": 0.1}, "mtp_losses": [2.5]})
    {'loss': 2.0, 'mtp_1_loss': 2.5, 'timers/data': 0.1}
    """
    moe = fields.pop("moe", {})
    norms = fields.pop("norms", {})
    fields |= _with_prefix("moe_", moe)
    for number, loss in enumerate(fields.pop("mtp_losses", []), start=1):
        fields[f"mtp_{number}_loss"] = loss
    fields |= _with_prefix("loss/", fields.pop("source_losses", {}))
    fields |= fields.pop("evaluation", {})
    fields |= _with_prefix("timers/", fields.pop("timers", {}))
    for kind, norm_by_group in norms.items():
        fields |= _with_prefix(f"norms/{kind}/", norm_by_group)
    del fields["step"]
    values = {name: value for name, value in fields.items() if isinstance(value, int | float)}
    for router, counts in moe.get("load", {}).items():
        if counts:
            values[f"moe_load/{router}"] = counts
    return values


def _with_prefix(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in values.items()}
