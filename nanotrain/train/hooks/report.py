"""report.html in the run folder: at the end of training, and every `report_interval` steps."""

from nanotrain.errors import NanotrainError
from nanotrain.log import get_logger
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.metrics.step_report import StepReport
from nanotrain.train.run import Run

log = get_logger(__name__)


class ReportHook(Hook):
    """Writes the report of the run, on the first rank; a failure is a warning and does not end the run."""

    def after_step(self, run: Run, report: StepReport) -> None:
        interval = run.config.train.report_interval
        if interval and report.step % interval == 0:
            _write(run)

    def after_training(self, run: Run) -> None:
        _write(run)


def _write(run: Run) -> None:
    if not run.context.control.is_first:
        return
    from nanotrain.report.history import RunHistory  # imported here: it would only delay the start of a run
    from nanotrain.report.page import write_report

    try:
        write_report([RunHistory.read(run.folder.path)], run.folder.report)
    except (NanotrainError, OSError) as error:
        log.warning("no report: %s", error)
