"""`Hook`: callbacks of the training loop; and two hooks that protect every run.

TimeoutHook     lower the timeout of collectives after the first step, which compiles, allocates and
                connects
SkippedSteps    end the run after too many skipped steps in a row
"""

from nanotrain.errors import TrainingFault
from nanotrain.log import get_logger
from nanotrain.quantities import count_of
from nanotrain.train.parts.faulty_ranks import ranks_at_fault
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport

log = get_logger(__name__)


class Hook:
    """Base class; subclasses override what they need. Every rank calls all hooks in one order.

    A hook that acts inside a step adds a `StepPart` to `run.parts` before training.

    A start that computes no step changes no file of the run: `before_training` may not change one,
    and hooks that are not `runs_always` are called neither before nor after it.
    """

    runs_always = False  # whether it is called where this start computes no step
    # whether `after_training` is called where a stage of the data ends that trains other parameters
    # than the next one
    runs_at_borders = False

    def before_training(self, run: Run) -> None:
        """Called once, before the first step; changes no file of the run folder."""

    def begin_writing(self, run: Run, *, step: int) -> None:
        """Called once, after the first step of this start and before its `after_step`.

        From here on files of the run folder may be changed.

        Args:
            run: run, with the first step done.
            step: the step that this start goes on from.
        """

    def needs_numbers(self, run: Run, step: int) -> bool:
        """Whether `after_step` of a step reads its numbers, for which the host then waits."""
        return False

    def after_step(self, run: Run, report: StepReport) -> None:
        """Called after every step."""

    def after_read(self, run: Run, report: StepReport) -> None:
        """Called once per step, in order, as soon as its numbers can be read without waiting.

        At a logged step that is right after `after_step`.
        """

    def save_now(self, run: Run) -> None:
        """Called between two steps after a rank received SIGUSR1."""

    def before_rollback(self, run: Run) -> None:
        """Called in place of `after_step` if the loss is a spike; `run` still has its state."""

    def after_rollback(self, run: Run, report: StepReport) -> None:
        """Called once `run` has the state of an earlier checkpoint.

        Args:
            run: run.
            report: report of the step with the spike.
        """

    def after_training(self, run: Run) -> None:
        """Called once after the loop, unless an error ended it."""

    def after_failure(self, run: Run) -> None:
        """Called after an error that all ranks raise between two steps; no step is half done."""

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
        """Set the timeout after the first step."""
        if self._timeout_s is None:
            return
        run.context.set_timeout(self._timeout_s)
        log.info("the timeout of collectives is %g s from now on", self._timeout_s)
        self._timeout_s = None


class SkippedSteps(Hook):
    """Ends the run at `--max-consecutive-skips`, on all ranks; `fit` calls it before other hooks.

    At a logged step the ranks exchange where the skipped steps since the last one were not finite.
    """

    def __init__(self) -> None:
        self._num_skipped = 0  # in a row
        # largest `local_fault` in the skipped steps since the last logged one; None without one
        self._fault: int | None = None
        self._where = ""  # the ranks of the last exchange

    def after_read(self, run: Run, report: StepReport) -> None:
        """Count the skipped steps in a row, and end the run if they are too many."""
        output = report.output
        if output.skipped:
            self._num_skipped += 1
            self._fault = max(self._fault or 0, output.local_fault)
        else:
            self._num_skipped = 0
        if report.is_logged and self._fault is not None:
            report.skipped_on = ranks_at_fault(self._fault, run.context.control)
            self._fault = None
            self._where = f" on {report.skipped_on}" if report.skipped_on else ""
        if output.skipped:
            self._judge(run, report)

    def _judge(self, run: Run, report: StepReport) -> None:
        """Warn of a skip that no loss scale can prevent; end the run after too many skips."""
        scaling = run.optimizer.loss_scale
        loss_scale = report.output.loss_scale
        at_minimum = scaling.is_dynamic and loss_scale <= scaling.minimum
        if self._num_skipped == 1 and at_minimum and run.context.control.is_first:
            log.warning(
                "step %d overflows at the minimal loss scale %g: no scale makes it finite",
                report.step,
                loss_scale,
            )
        if self._num_skipped == run.config.train.max_consecutive_skips:
            raise self._too_many(report, at_minimum=at_minimum)

    def _too_many(self, report: StepReport, *, at_minimum: bool) -> TrainingFault:
        """The error for too many skipped steps in a row."""
        why = f"their gradients are not finite{self._where}"
        if at_minimum:
            why += f", at the minimal loss scale {report.output.loss_scale:g}"
        usual_fix = (
            "find the first tensor with --debug-nan, lower --lr, or raise --max-consecutive-skips"
        )
        steps = count_of(self._num_skipped, "step")
        return TrainingFault(
            f"{steps} in a row without an update, the last is step {report.step}",
            why=why,
            fix=report.output.metrics.get("skip_reason") or usual_fix,
        )
