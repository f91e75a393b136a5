"""`Hook`: callbacks of the training loop; and two that protect every run.

TimeoutHook     lower the timeout of collectives after the first step, which compiles, allocates and connects
SkippedSteps    end the run after too many skipped steps in a row
"""

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.group import Group
from nanotrain.errors import TrainingFault
from nanotrain.log import get_logger
from nanotrain.quantities import count_of, named_ranks
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport

log = get_logger(__name__)


class Hook:
    """Base class; subclasses override what they need. Every rank calls every hook, in the order of
    the list.

    A hook that acts inside a step adds a `StepPart` to `run.parts` before training.
    """

    def before_training(self, run: Run) -> None:
        """Called once, before the first step."""

    def after_step(self, run: Run, report: StepReport) -> None:
        """Called after every step."""

    def after_read(self, run: Run, report: StepReport) -> None:
        """Called once per step, in order, as soon as the numbers of the step can be read without
        waiting.

        At a logged step that is right after `after_step`.
        """

    def save_now(self, run: Run) -> None:
        """Called between two steps after a rank received SIGUSR1."""

    def before_rollback(self, run: Run) -> None:
        """Called after a step whose loss is a spike, in place of `after_step`; `run` still has its
        state.
        """

    def after_rollback(self, run: Run, report: StepReport) -> None:
        """Called once `run` has the state of an earlier checkpoint; `report` is of the step with
        the spike.
        """

    def after_training(self, run: Run) -> None:
        """Called once after the loop, unless an error ended it."""

    def after_failure(self, run: Run) -> None:
        """Called after an error between two steps that all ranks raise together; the last step is
        complete.
        """

    def close(self, *, failed: bool) -> None:
        """Release files and the terminal; called once at the end, after an error too (`failed`)."""


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


class SkippedSteps(Hook):
    """Ends the run, on all ranks, at `--max-consecutive-skips`; `fit` calls it before all other
    hooks.

    At a logged step the ranks exchange where the skipped steps since the last one were not finite.
    """

    def __init__(self) -> None:
        self._num_skipped = 0  # in a row
        # of this rank in the skipped steps since the last logged one; None without one
        self._fault: int | None = None
        self._where = ""  # the ranks of the last exchange

    def after_read(self, run: Run, report: StepReport) -> None:
        scaling, loss_scale = run.optimizer.loss_scale, report.output.loss_scale
        self._num_skipped = self._num_skipped + 1 if report.output.skipped else 0
        if report.output.skipped:
            self._fault = max(self._fault or 0, report.output.local_fault)
        if report.is_logged and self._fault is not None:
            report.skipped_on, self._fault = ranks_at_fault(self._fault, run.context.control), None
            self._where = f" on {report.skipped_on}" if report.skipped_on else ""
        at_minimum = scaling.is_dynamic and loss_scale <= scaling.minimum
        if self._num_skipped == 1 and at_minimum and run.context.control.is_first:
            what = "step %d overflows at the minimal loss scale %g: no scale makes it finite"
            log.warning(what, report.step, loss_scale)
        if self._num_skipped and self._num_skipped == run.config.train.max_consecutive_skips:
            raise TrainingFault(
                f"{count_of(self._num_skipped, 'step')} in a row without an update, the last is step {report.step}",
                why=f"their gradients are not finite{self._where}"
                + (f", at the minimal loss scale {loss_scale:g}" * at_minimum),
                fix=report.output.metrics.get("skip_reason")
                or "find the first tensor with --debug-nan, lower --lr, or raise --max-consecutive-skips",
            )


def ranks_at_fault(local_fault: int, group: Group) -> str | None:
    """The ranks with the largest `local_fault` of a step: those whose loss is not finite, else
    whose gradients are not.

    None if every rank's own numbers are finite: their sum over the ranks is not. Every rank calls
    this.
    """
    faults = all_gather_object(local_fault, group)
    return (
        named_ranks([rank for rank, fault in enumerate(faults) if fault == max(faults)])
        if any(faults)
        else None
    )
