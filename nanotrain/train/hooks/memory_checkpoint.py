"""Checkpoints in the memory of the hosts every `memory_checkpoint_interval` steps.

A save blocks training while its tensors are copied to host memory. The next one waits for it. One
that fails is a warning: checkpoints on the disk do not depend on it. At the end of a run its
folders are removed; after an error they stay for the restart.
"""

import time

from nanotrain.checkpoint.all_ranks import run_on_first
from nanotrain.checkpoint.host_folder import remove_folder
from nanotrain.checkpoint.memory_checkpointer import MemoryCheckpointer
from nanotrain.comm.collectives import barrier
from nanotrain.comm.work import CommunicationFault
from nanotrain.errors import NanotrainError
from nanotrain.log import get_logger
from nanotrain.train.hooks.checkpoint import GIVE_UP_S
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.hooks.save_content import SaveContent, tensors_to_save
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport

log = get_logger(__name__)


class MemoryCheckpointHook(Hook):
    """Writes checkpoints into the memory of the hosts."""

    runs_always = True  # a start that has no steps left removes the folders of the last one

    def __init__(self) -> None:
        self._writer: MemoryCheckpointer | None = None
        self._content = SaveContent()
        self._has_saved = False

    def begin_writing(self, run: Run, *, step: int) -> None:
        """Open the folders, and delete the checkpoints that this start did not begin with."""
        assert run.inputs.memory is not None, "`open_run` opens it"
        memory = run.inputs.memory
        opened = memory.open()
        assert opened is not None, "the run has begun"
        self._writer = MemoryCheckpointer(
            opened,
            store=run.context.store,
            timeout_s=60 * run.config.parallel.distributed_timeout_minutes,
            num_starts=run_on_first(run.context.control, lambda: len(memory.start_steps())),
        )
        self._writer.drop(keep=None if memory.start is None else step)

    def needs_numbers(self, run: Run, step: int) -> bool:
        return step % run.config.checkpoint.memory_checkpoint_interval == 0

    def after_step(self, run: Run, report: StepReport) -> None:
        """Save at each interval."""
        if self._writer is None or not self.needs_numbers(run, report.step):
            return
        run.context.heartbeat.begin("checkpoint")
        self._finish(run)
        start = time.perf_counter()
        try:
            content = self._content.of(run, report)
            self._writer.start_save(report.step, tensors_to_save(run), **content)
        except CommunicationFault:
            raise
        except NanotrainError as error:  # the same on all ranks
            self._warn(run, error)
            return
        level = log.debug if self._has_saved else log.info
        self._has_saved = True
        duration_s = time.perf_counter() - start
        level("saving step %d in host memory, after %.3f s", report.step, duration_s)

    def before_rollback(self, run: Run) -> None:
        self._finish(run)

    def after_rollback(self, run: Run, report: StepReport) -> None:
        """Delete all: none of them skips the samples of the spike."""
        if self._writer is not None:
            self._writer.drop()

    def after_training(self, run: Run) -> None:
        """Remove the folders: the last step is in the run folder."""
        self._finish(run)
        assert run.inputs.memory is not None, "`open_run` opens it"
        memory = run.inputs.memory.open()
        if memory is None:  # no step was ever done
            return
        barrier(run.context.control)
        if memory.is_host_first:
            remove_folder(memory.folder)

    def after_failure(self, run: Run) -> None:
        self._finish(run)

    def close(self, *, failed: bool) -> None:
        if self._writer is not None and not self._writer.give_up(GIVE_UP_S):
            log.warning("the last memory checkpoint was not finished")

    def _finish(self, run: Run) -> None:
        """Complete the save in flight, on all ranks."""
        if self._writer is None:
            return
        try:
            self._writer.wait()
        except CommunicationFault:
            raise
        except NanotrainError as error:
            self._warn(run, error)

    @staticmethod
    def _warn(run: Run, error: NanotrainError) -> None:
        if run.context.control.is_first:
            log.warning("%s; training goes on without this memory checkpoint", error)
