"""`--average-saves N`: the mean of the weights of the last N checkpoints, after every save.

    RUN/averages/step-00003000   a checkpoint without optimizer state, as of `nanotrain checkpoint
                                 average`; the newest one is kept

The first rank reads the checkpoints chunk by chunk on a thread, so it needs no memory of the model
and training goes on. Where checkpoints may be deleted or renamed (the next save, a rollback, the
end), it is waited for. Between, a step lists the folder of checkpoints and opens no file. A failure
is a warning: training does not depend on the average.

A run that goes back to an earlier step removes the averages of later steps, and averages none of
the checkpoints that it sets aside. After --load of another run, its own earlier ones do not count.

Source: Tian et al. 2025, "WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging"; Meituan
LongCat 2025.
"""

import shutil
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nanotrain.checkpoint.store import last_complete, step_entries, step_of
from nanotrain.errors import NanotrainError
from nanotrain.log import get_logger
from nanotrain.quantities import count_of, step_name
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
        self._after = -1  # checkpoints up to this step are another run's
        self._considered = -1  # step of the newest checkpoint that was averaged, or was there
        self._thread: threading.Thread | None = None
        self._is_unreadable = False  # whether the last listing failed, which is said once

    def begin_writing(self, run: Run, *, step: int) -> None:
        """Count the checkpoints up to `step` as averaged; later ones are set aside after this."""
        if not run.context.control.is_first:
            return
        self._folder = run.folder.path
        remove_averages_after(step, self._folder)
        if run.inputs.live is None and not _is_own(run.inputs.checkpoint, self._folder):
            self._after = step
        self._considered = max((found for found in self._steps() if found <= step), default=-1)

    def after_step(self, run: Run, report: StepReport) -> None:
        """Look for a new checkpoint; before a save, which may drop some, wait for the average."""
        self._start()
        if report.step % run.config.checkpoint.save_interval == 0:
            self._wait()

    def save_now(self, run: Run) -> None:
        self._start()
        self._wait()

    def before_rollback(self, run: Run) -> None:
        self._wait()

    def after_rollback(self, run: Run, report: StepReport) -> None:
        """Count the checkpoint that the run is back at, which is saved again with its weights."""
        if self._folder is not None:
            remove_averages_after(run.state.step, self._folder)
            self._considered = run.state.step

    def after_training(self, run: Run) -> None:
        self._wait()  # the last save follows

    def after_failure(self, run: Run) -> None:
        self._wait()

    def close(self, *, failed: bool) -> None:
        """Average the last checkpoint of the run too, unless an error ended it."""
        self._wait()
        if not failed:
            self._start()
            self._wait()

    def _start(self) -> None:
        """Start to average if there is a new checkpoint and no average is being written."""
        if self._folder is None or self._thread is not None and self._thread.is_alive():
            return
        steps = self._steps()
        if not steps or steps[-1] == self._considered:
            return
        self._considered = steps[-1]
        average = partial(average_last, num_saves=self._num_saves, after=self._after)
        self._thread = threading.Thread(target=average, args=(self._folder, steps[-1]))
        self._thread.start()

    def _steps(self) -> list[int]:
        """The steps with a checkpoint, complete or not; empty if the folder cannot be listed."""
        assert self._folder is not None, "callers check it"
        try:
            steps = [step_of(path) for path in step_entries(self._folder / "checkpoints")]
        except OSError as error:
            if not self._is_unreadable:
                log.warning("no checkpoint is averaged: %s", error)
            self._is_unreadable = True
            return []
        self._is_unreadable = False
        return steps

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _is_own(checkpoint: Path | None, run_folder: Path) -> bool:
    """Whether a run goes on from a checkpoint of its own folder."""
    if checkpoint is None:
        return False
    return checkpoint.resolve().parent == (run_folder / "checkpoints").resolve()


def average_last(run_folder: Path, step: int, *, num_saves: int, after: int = -1) -> None:
    """Average the last complete checkpoints of a run if there are enough; errors are warnings.

    Args:
        run_folder: folder of the run.
        step: step of the newest checkpoint.
        num_saves: number of checkpoints in the average.
        after: only checkpoints of later steps than this count.
    """
    try:
        last = last_complete(run_folder / "checkpoints", num_saves)
    except (NanotrainError, OSError) as error:
        _warn(step, error)
        return
    saves = [path for path in last if step_of(path) > after]
    if not saves or step_of(saves[-1]) != step:
        _warn(step, "its checkpoint is not complete")
    elif len(saves) == num_saves:
        write_average(saves, run_folder)


def write_average(saves: Sequence[Path], run_folder: Path) -> None:
    """Write the mean of checkpoints into a run folder, and drop other means; errors are warnings.

    Args:
        saves: step folders, oldest first.
        run_folder: folder of the run.
    """
    from nanotrain.inference.checkpoint import average_with_tokenizer  # not needed by most runs

    step = step_of(saves[-1])
    output = run_folder / "averages" / step_name(step)
    try:
        shutil.rmtree(output, ignore_errors=True)  # a step that is saved again
        average_with_tokenizer(saves, output)
        for other in output.parent.iterdir():
            # also what a killed writer left; a folder of another name is the user's
            if other != output and other.name.lstrip(".").startswith("step-"):
                shutil.rmtree(other)
    except (NanotrainError, OSError) as error:
        _warn(step, error)
        return
    checkpoints = count_of(len(saves), "checkpoint")
    log.info("%s: weights averaged over %s", output, checkpoints)


def remove_averages_after(step: int, run_folder: Path) -> None:
    """Remove the averages of steps that the run repeats; an error is a warning."""
    try:
        for path in step_entries(run_folder / "averages"):
            if step_of(path) > step:
                shutil.rmtree(path)
                log.info("going on at step %d: removed the later average %s", step, path)
    except OSError as error:
        log.warning("averages of steps after %d were not removed: %s", step, error)


def _warn(step: int, why: object) -> None:
    log.warning("the average of %s was not written: %s", step_name(step), why)
