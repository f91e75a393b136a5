"""At the end of a run in object storage, upload its files; each save uploads them too."""

from nanotrain.checkpoint.stored import FileUploads
from nanotrain.errors import StorageFault
from nanotrain.log import get_logger
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run

log = get_logger(__name__)


class UploadHook(Hook):
    """Uploads what changed since the last save, on the first rank; a failure is a warning."""

    def after_training(self, run: Run) -> None:
        remote = run.folder.remote
        if remote is None or not run.context.control.is_first:
            return
        try:
            FileUploads(run.folder.path, remote).upload()
            log.info("uploaded the files of the run to %s", remote)
        except StorageFault as error:
            log.warning("%s; the files of the run are in %s", error, run.folder.path)

    def after_failure(self, run: Run) -> None:
        self.after_training(run)
