"""Checkpoints every `save_interval` steps and at the end of a run."""

from dataclasses import asdict

from nanotrain.checkpoint.store import set_aside_after
from nanotrain.config.schema import to_dict
from nanotrain.errors import NanotrainError
from nanotrain.log import get_logger
from nanotrain.train.fp8 import amax_histories_to_save
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.metrics import StepReport
from nanotrain.train.routers import router_biases_to_save
from nanotrain.train.run import Run

log = get_logger(__name__)


class CheckpointHook(Hook):
    """Writes checkpoints."""

    def __init__(self) -> None:
        self._saved_step: int | None = None

    def before_training(self, run: Run) -> None:
        if run.context.control.is_first:
            renamed = set_aside_after(run.checkpointer.folder, run.state.step)
            if renamed:
                names = ", ".join(path.name for path in renamed)
                log.info("starting at step %d: renamed later checkpoints: %s", run.state.step, names)
        self._saved_step = run.state.step  # a resumed step is already on disk

    def after_step(self, run: Run, report: StepReport) -> None:
        interval = run.config.checkpoint.save_interval
        if interval and report.step % interval == 0:
            self._save(run)

    def after_training(self, run: Run) -> None:
        if self._saved_step != run.state.step:
            self._save(run)

    def after_failure(self, run: Run) -> None:
        """Save the last step on the way out; the disk may be the reason for the failure."""
        if self._saved_step == run.state.step:
            return
        try:
            self._save(run)
        except NanotrainError as error:
            log.error("step %d could not be saved: %s", run.state.step, error)

    def _save(self, run: Run) -> None:
        run.context.heartbeat.begin("checkpoint")
        path = run.checkpointer.save(
            run.state.step,
            run.optimizer.tensors_to_save()
            | router_biases_to_save(run.stages, run.context)
            | amax_histories_to_save(run.stages, run.context),
            objects={"train": run.state.to_dict(), "optimizer": run.optimizer.state_dict()},
            config=to_dict(run.config),
            topology={"world_size": run.context.topology.world_size, **asdict(run.context.topology.dense)},
        )
        self._saved_step = run.state.step
        log.info("saved %s", path)
