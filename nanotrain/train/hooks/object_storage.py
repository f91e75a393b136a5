"""At the end of a run in object storage, upload the files that saves have not uploaded."""

from nanotrain.checkpoint.remote_checkpointer import RemoteCheckpointer
from nanotrain.errors import StorageFault
from nanotrain.log import get_logger
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run

log = get_logger(__name__)


class UploadHook(Hook):
    """Uploads changed files on the first rank, after training also checkpoints.

    A failure is a warning.
    """

    runs_always = True  # the last start may have failed to upload

    def after_training(self, run: Run) -> None:
        _upload(run, is_finished=True)

    def after_failure(self, run: Run) -> None:
        _upload(run, is_finished=False)


def _upload(run: Run, *, is_finished: bool) -> None:
    """Upload changed files of the run folder, on the first rank; a failure is a warning."""
    checkpointer = run.checkpointer
    if not isinstance(checkpointer, RemoteCheckpointer) or not run.context.control.is_first:
        return
    try:
        if is_finished:
            checkpointer.finish()
        else:
            checkpointer.files.upload()
        log.info("uploaded the files of the run to %s", run.folder.remote)
    except StorageFault as error:
        log.warning("%s; the files of the run are in %s", error, run.folder.path)
