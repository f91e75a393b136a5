"""At the end of a run in object storage, upload what saves have not."""

from nanotrain.checkpoint.remote_checkpointer import RemoteCheckpointer
from nanotrain.errors import StorageFault
from nanotrain.log import get_logger
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run

log = get_logger(__name__)


class UploadHook(Hook):
    """Uploads files that have changed, on the first rank, after training also checkpoints; a
    failure is a warning.
    """

    def after_training(self, run: Run, *, is_finished: bool = True) -> None:
        checkpointer = run.checkpointer
        if not isinstance(checkpointer, RemoteCheckpointer) or not run.context.control.is_first:
            return
        try:
            checkpointer.finish() if is_finished else checkpointer.files.upload()
            log.info("uploaded the files of the run to %s", run.folder.remote)
        except StorageFault as error:
            log.warning("%s; the files of the run are in %s", error, run.folder.path)

    def after_failure(self, run: Run) -> None:
        self.after_training(run, is_finished=False)
