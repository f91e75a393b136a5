"""Lower the timeout of collectives after the first step, which compiles, allocates and connects."""

from nanotrain.log import get_logger
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.metrics.step_report import StepReport
from nanotrain.train.run import Run

log = get_logger(__name__)


class TimeoutHook(Hook):
    """Sets the timeout of all groups after the first step of this start.

    Args:
        timeout_s: the timeout after the first step.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s: float | None = timeout_s  # None once it is set

    def after_step(self, run: Run, report: StepReport) -> None:
        if self._timeout_s is None:
            return
        run.context.set_timeout(self._timeout_s)
        log.info("the timeout of collectives is %g s from now on", self._timeout_s)
        self._timeout_s = None
