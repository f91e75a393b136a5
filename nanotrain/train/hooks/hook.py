"""What happens around the steps: a hook sees the run and the report of the step, in the order of the list."""

from nanotrain.train.metrics import StepReport
from nanotrain.train.run import Run


class Hook:
    """Does nothing; the others override what they need. Every rank calls every hook."""

    def before_training(self, run: Run) -> None:
        """Called once, before the first step."""

    def after_step(self, run: Run, report: StepReport) -> None:
        """Called after every step."""

    def after_training(self, run: Run) -> None:
        """Called once, when the loop has ended for whatever reason but an error."""

    def close(self, *, failed: bool) -> None:
        """Called last and once, after an error too (`failed`): let go of files and screens; the run may be broken."""
