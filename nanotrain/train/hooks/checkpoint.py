"""Checkpoints every `save_interval` steps, on SIGUSR1 and at the end of a run.

    --async-save   a periodic save blocks training while its tensors are copied to host memory; the
                   next save, the end of the run and SIGTERM wait for it

If a periodic save fails for lack of space, training continues; the failure is counted and the next
interval saves again, unless `--exit-on-save-failure` is set. If the last save fails, it is tried
again in `--save-fallback-dir`; without that folder the run ends with exit code 2.

A start that has no steps left saves the step that it has from the memory of ranks or hosts alone.
"""

import time
from pathlib import Path

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.errors import NanotrainError, StorageFault
from nanotrain.log import get_logger
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.hooks.save_content import SaveContent, tensors_to_save
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport

log = get_logger(__name__)

# After an error a save in flight has this much time to finish: torchrun kills the ranks after 30 s.
GIVE_UP_S = 20.0


class CheckpointHook(Hook):
    """Writes checkpoints."""

    runs_always = True  # the last save may have failed
    runs_at_borders = True  # the next stage begins with its checkpoint

    def __init__(self) -> None:
        self._saved_step: int | None = None  # the last step saved, or being saved in the background
        self._saved_updates: int | None = None  # updates of the weights until the saved step
        self._in_flight: Checkpointer | None = None
        self._is_reported = False  # whether the first rank has logged how the save in flight ended
        self._ends_run = (
            False  # whether the run ends with the error of a failed save, which names it
        )
        self._report: StepReport | None = None  # report of the last step
        self._content = SaveContent()

    def before_training(self, run: Run) -> None:
        self._report = None  # a report from before does not count
        memory = run.inputs.memory
        is_in_memory_alone = memory is not None and memory.is_start_newer
        if run.inputs.live is None and not is_in_memory_alone:
            self._saved_step = run.state.step  # a resumed step is already on disk
            self._saved_updates = run.optimizer.num_updates

    def begin_writing(self, run: Run, *, step: int) -> None:
        _rename_later(run, step=step)

    def after_step(self, run: Run, report: StepReport) -> None:
        """Save at each `save_interval`, unless all steps since the last save were skipped."""
        self._report = report
        interval = run.config.checkpoint.save_interval
        if not interval or report.step % interval:
            self._poll(run)
        elif self._saved_updates == run.optimizer.num_updates:
            log.info(
                "step %d is not saved: all steps since %s were skipped",
                report.step,
                self._saved_step,
            )
        else:
            self._save_and_go_on(run)

    def save_now(self, run: Run) -> None:
        """Save as at an interval; a step that is saved, or being saved, is not saved again."""
        if self._saved_step != run.state.step:
            self._save_and_go_on(run)

    def before_rollback(self, run: Run) -> None:
        self._finish(run)

    def after_rollback(self, run: Run, report: StepReport) -> None:
        """Save the step again with the samples to skip, so that a resume skips them too."""
        _rename_later(run, step=run.state.step)
        self._report = None  # the step with the spike does not count
        self._save_and_go_on(run)

    def after_training(self, run: Run) -> None:
        self._finish(run)
        goes_on = run.stop.successor is not None  # from memory
        if self._saved_step != run.state.step and not goes_on:
            self._save_last(run)

    def after_failure(self, run: Run) -> None:
        """Save the last step before the run ends with the error, which may come from the disk."""
        try:
            self._finish(run, is_strict=False)
            if self._saved_step != run.state.step:
                self._save_last(run)
        except NanotrainError as error:  # the same on all ranks
            if run.context.control.is_first and not self._ends_run:
                log.error("step %d could not be saved: %s", run.state.step, error)

    def close(self, *, failed: bool) -> None:
        if self._in_flight is not None and not self._in_flight.give_up(GIVE_UP_S):
            log.warning("the checkpoint of step %s was not finished", self._saved_step)

    def _save_and_go_on(self, run: Run) -> None:
        """Save; a save that fails is handled as the settings say."""
        self._finish(run)
        try:
            if run.config.checkpoint.async_save:
                self._start_save(run)
            else:
                self._save(run, run.checkpointer)
        except StorageFault as error:
            self._handle_failed_save(run, error)

    def _start_save(self, run: Run) -> None:
        """Start to save in the background."""
        run.context.heartbeat.begin("checkpoint")
        tensors = tensors_to_save(run)
        content = self._content.of(run, self._report)
        start = time.perf_counter()
        run.checkpointer.start_save(run.state.step, tensors, prunes=self._may_prune, **content)
        duration_s = time.perf_counter() - start
        log.info("saving step %d in the background, after %.3f s", run.state.step, duration_s)
        self._in_flight = run.checkpointer
        self._count_as_saved(run)

    def _save(self, run: Run, checkpointer: Checkpointer) -> None:
        """Save, and wait until the checkpoint is complete."""
        run.context.heartbeat.begin("checkpoint")
        tensors = tensors_to_save(run)
        content = self._content.of(run, self._report)
        path = checkpointer.save(run.state.step, tensors, prunes=self._may_prune, **content)
        log.info("saved %s", path)
        self._count_as_saved(run)

    def _count_as_saved(self, run: Run) -> None:
        self._saved_step = run.state.step
        self._saved_updates = run.optimizer.num_updates

    @property
    def _may_prune(self) -> bool:
        """Whether older checkpoints may be deleted after a save.

        While steps are skipped the weights may be lost already, and an older checkpoint be the one
        to go back to.
        """
        return self._report is None or not self._report.output.skipped

    def _save_last(self, run: Run) -> None:
        """Save in the run folder, or else in the fallback folder."""
        try:
            self._save(run, run.checkpointer)
        except StorageFault as error:
            folder = run.config.checkpoint.save_fallback_dir
            if folder is None:
                raise
            if run.context.control.is_first and not self._ends_run:
                log.warning("step %d cannot be saved in the run folder: %s", run.state.step, error)
            # A folder per run: checkpoints of another run with the same step would be replaced.
            subfolder = Path(folder) / run.folder.path.resolve().name
            self._save(run, run.checkpointer.in_folder(subfolder))

    def _poll(self, run: Run) -> None:
        """Report a save in flight once it has ended, on the first rank."""
        if self._in_flight is None or self._is_reported or not run.context.control.is_first:
            return
        try:
            path = self._in_flight.poll()
        except StorageFault as error:
            self._is_reported = True
            self._handle_failed_save(run, error)
            return
        if path is not None:
            self._is_reported = True
            log.info("saved %s", path)

    def _finish(self, run: Run, *, is_strict: bool = True) -> None:
        """Complete the save in flight, on all ranks."""
        writer = self._in_flight
        if writer is None:
            return
        self._in_flight = None
        is_reported = self._is_reported
        self._is_reported = False
        run.context.heartbeat.begin("checkpoint")
        try:
            path = writer.wait()
            if not is_reported:
                log.info("saved %s", path)
        except StorageFault as error:
            self._saved_step = None
            self._saved_updates = None
            if is_strict and not is_reported:
                self._handle_failed_save(run, error)

    def _handle_failed_save(self, run: Run, error: StorageFault) -> None:
        """Handle a failed save: an error if `exit_on_save_failure`, else a warning."""
        if run.config.checkpoint.exit_on_save_failure:
            self._ends_run = True
            raise error
        if not run.context.control.is_first:
            return
        again = "training goes on and saves again at the next interval"
        if run.state.step >= run.config.train.train_iters:
            again = "the last save is tried next"
        log.warning("%s; %s", error, again)


def _rename_later(run: Run, *, step: int) -> None:
    """Rename the checkpoints of the steps after `step`, which the run repeats."""
    if not run.context.control.is_first:
        return
    renamed = run.checkpointer.set_aside_after(step)
    if renamed:
        names = ", ".join(path.name for path in renamed)
        log.info("starting at step %d: renamed later checkpoints: %s", step, names)
