"""`--average-saves N`: the mean of the weights of the last N checkpoints, after every save.

    RUN/averages/step-00003000   a checkpoint without optimizer state, as of `nanotrain checkpoint
                                 average`; the newest one is kept

The first rank reads the checkpoints chunk by chunk on a thread, so it needs no memory of the model
and training goes on. The next save waits for it. A failure is a warning: training does not depend
on the average.

Source: Tian et al. 2025, "WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging"; Meituan
LongCat 2025.
"""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from nanotrain.checkpoint.store import complete_checkpoints
from nanotrain.errors import NanotrainError
from nanotrain.log import get_logger
from nanotrain.quantities import count_of
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport

log = get_logger(__name__)


class AverageSavesHook(Hook):
    """Averages the last checkpoints of the run folder; called before the hook that saves.

    Args:
        num_saves: number of checkpoints in an average, at least 2.
    """

    runs_at_borders = True  # the run goes on in the same folder

    def __init__(self, num_saves: int) -> None:
        self._num_saves = num_saves
        self._folder: Path | None = None  # on the first rank, once files may be written
        self._averaged: Path | None = None  # newest checkpoint that was considered
        self._thread: threading.Thread | None = None

    def begin_writing(self, run: Run, *, step: int) -> None:
        if run.context.control.is_first:
            self._folder = run.folder.path
            saves = complete_checkpoints(run.folder.checkpoints)
            self._averaged = saves[-1] if saves else None

    def after_step(self, run: Run, report: StepReport) -> None:
        """Look for a new checkpoint; before a save, which may drop some, wait for the average."""
        if self._folder is None:
            return
        interval = run.config.checkpoint.save_interval
        if interval and report.step % interval == 0:
            self._wait()
        if interval and report.step > interval:
            self._start()

    def save_now(self, run: Run) -> None:
        self._wait()

    def close(self, *, failed: bool) -> None:
        """Average the last checkpoint of the run too, unless an error ended it."""
        self._wait()
        if self._folder is not None and not failed:
            self._start()
            self._wait()

    def _start(self) -> None:
        """Start to average if there is a new checkpoint and enough of them."""
        if self._folder is None or self._thread is not None and self._thread.is_alive():
            return
        saves = complete_checkpoints(self._folder / "checkpoints")[-self._num_saves :]
        if len(saves) < self._num_saves or saves[-1] == self._averaged:
            return
        self._averaged = saves[-1]
        self._thread = threading.Thread(target=write_average, args=(saves, self._folder))
        self._thread.start()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def write_average(saves: Sequence[Path], run_folder: Path) -> None:
    """Write the mean of checkpoints into a run folder, and drop earlier means; errors are warnings.

    Args:
        saves: step folders, oldest first.
        run_folder: folder of the run.
    """
    from nanotrain.inference.checkpoint import average_with_tokenizer  # not needed by most runs

    output = run_folder / "averages" / saves[-1].name
    try:
        shutil.rmtree(output, ignore_errors=True)  # a step that is saved again
        average_with_tokenizer(saves, output)
        for older in output.parent.iterdir():
            if older.name < output.name:
                shutil.rmtree(older)
    except (NanotrainError, OSError) as error:
        log.warning("the average of %s was not written: %s", saves[-1].name, error)
        return
    checkpoints = count_of(len(saves), "checkpoint")
    log.info("%s: weights averaged over %s", output, checkpoints)
