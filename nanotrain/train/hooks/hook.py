"""`Hook`: callbacks of the training loop."""

from nanotrain.train.metrics.step_report import StepReport
from nanotrain.train.run import Run


class Hook:
    """Base class; subclasses override what they need. Every rank calls every hook, in the order of the list.

    A hook that acts inside a step adds a `StepPart` to `run.parts` before training.
    """

    def before_training(self, run: Run) -> None:
        """Called once, before the first step."""

    def after_step(self, run: Run, report: StepReport) -> None:
        """Called after every step."""

    def save_now(self, run: Run) -> None:
        """Called between two steps after a rank received SIGUSR1."""

    def before_rollback(self, run: Run) -> None:
        """Called after a step whose loss is a spike, in place of `after_step`; `run` still has its state."""

    def after_rollback(self, run: Run, report: StepReport) -> None:
        """Called once `run` has the state of an earlier checkpoint; `report` is of the step with the spike."""

    def after_training(self, run: Run) -> None:
        """Called once after the loop, unless an error ended it."""

    def after_failure(self, run: Run) -> None:
        """Called after an error between two steps that all ranks raise together; the last step is complete."""

    def close(self, *, failed: bool) -> None:
        """Release files and the terminal; called once at the end, after an error too (`failed`)."""
