"""Start from a checkpoint of Megatron-LM, which is imported into the run folder first.

    with_imported_start     the configuration whose --load names the imported checkpoint
    find_megatron_source    the folder of Megatron-LM that a start begins from, if any

One rank per machine imports, under a file lock; the others wait for it. What is imported stays: a
second start from the same step takes it.
"""

import zlib
from pathlib import Path

from nanotrain.checkpoint.store import is_megatron, step_entries
from nanotrain.config.config import Config
from nanotrain.config.schema import with_values
from nanotrain.errors import NanotrainError
from nanotrain.interop.imported import LINES_FILE, naming_flag
from nanotrain.interop.megatron.folder import find_step_folder
from nanotrain.interop.megatron.import_run import import_megatron, open_megatron
from nanotrain.log import get_logger
from nanotrain.runs.folder import RunFolder
from nanotrain.storage.remote import is_address
from nanotrain.train.file_lock import file_lock

log = get_logger(__name__)

IMPORTED = "imported"  # in the run folder
# files of a step; the run folder may be the same one
STEP_FILES = ("metadata.json", "common.pt", ".metadata", "*.distcp", "mp_rank_*/*.pt")


def with_imported_start(config: Config, folder: RunFolder) -> Config:
    """The configuration of a start; a checkpoint of Megatron-LM that it begins from is imported.

    Raises:
        CheckpointError: the checkpoint cannot be imported.
        EnvironmentFault: the run folder cannot be written.
    """
    source = find_megatron_source(config, folder)
    if source is None:
        return config
    step = find_step_folder(source)
    optim = takes_optim(config)
    target = folder.path / IMPORTED / import_name(step, optim=optim)
    folder.require_writable(probes=False)
    what = "it was imported before"
    if not target.is_dir():
        what = "a checkpoint of Megatron-LM is imported first"
    log.info("--load %s: %s", source, what)
    with file_lock(folder.path / ".importing", "import the checkpoint of Megatron-LM"):
        if not target.is_dir():
            import_step(step, target, optim=optim)
    # here, since the first rank alone logs, and another one may have imported
    lines = target / LINES_FILE
    for line in lines.read_text("utf-8").splitlines() if lines.is_file() else []:
        log.info("%s", line)
    return with_values(config, {"checkpoint.load": str(target)})


def import_step(step: Path, target: Path, *, optim: bool) -> None:
    """Import a step, unless another machine does so at the same time and is first.

    File locks of some shared file systems hold on one machine only.

    Raises:
        CheckpointError, EnvironmentFault: as `with_imported_start`.
    """
    try:
        with naming_flag("--no-load-optim"):
            import_megatron(step, target, optim=optim)
    except NanotrainError:
        if not target.is_dir():
            raise


def find_megatron_source(config: Config, folder: RunFolder) -> Path | None:
    """The folder of Megatron-LM that a start begins from: the one of --load, or the run folder.

    A launch script of Megatron-LM may save where it loads. Its folder is then the run folder, whose
    own checkpoints come first.
    """
    options = config.checkpoint
    if options.load is not None:
        is_local = not is_address(options.load)
        return Path(options.load) if is_local and is_megatron(Path(options.load)) else None
    if not options.auto_resume or step_entries(folder.checkpoints):
        return None
    return folder.path if is_megatron(folder.path) else None


def check_megatron_source(config: Config, source: Path) -> None:
    """Check that a checkpoint of Megatron-LM can be imported; its tensors are not read.

    Raises:
        CheckpointError: it cannot.
    """
    with naming_flag("--no-load-optim"):
        open_megatron(source, optim=takes_optim(config))


def takes_optim(config: Config) -> bool:
    """Whether a start loads the state of the optimizer."""
    return config.checkpoint.load_optim and not config.checkpoint.finetune


def import_name(step: Path, *, optim: bool) -> str:
    """The name of an imported step: another one for other files, or without optimizer state."""
    facts = [str(step.resolve()), str(optim)]
    files: list[Path] = []
    for pattern in STEP_FILES:
        files += step.glob(pattern)
    for file in sorted(files):
        status = file.stat()
        facts.append(f"{file.relative_to(step)} {status.st_size} {status.st_mtime_ns}")
    return f"{step.name}-{zlib.crc32(chr(10).join(facts).encode()):08x}"
