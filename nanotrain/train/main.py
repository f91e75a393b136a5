"""`main`, `pretrain` and `train`: from a command line or a configuration to the end of training.

Each runs on one rank.

    argv -> Loaded      without torch, so that mistakes show at once
         -> Start       the device of this rank, checked; the run folder is claimed
         -> the rest in train/open_and_train.py

A user error is one message and exit code 2, without a traceback. Nearly all of them are raised by
every rank, so the first rank of a machine prints and the others wait: torchrun ends them once it
has exited. A rank that is still alive after the wait is the only one with the error and prints it.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line, load_object, reply
from nanotrain.config.rules.check import validate_start
from nanotrain.errors import (
    INTERRUPTED,
    EnvironmentFault,
    LocalFault,
    NanotrainError,
    ReportedFault,
    report,
)
from nanotrain.log import get_logger, start_logging
from nanotrain.runs.failures import Reporter, recording
from nanotrain.runs.folder import RunFolder
from nanotrain.runs.lock import LOCK_NAME, lock_run
from nanotrain.runs.relayout import with_recorded_layout
from nanotrain.scheduler import require_one_task
from nanotrain.system import (
    core_limit,
    importing_torch,
    outlive_output,
    usable_cores,
)

if TYPE_CHECKING:
    from nanotrain.report.history import RunHistory

# Ranks reach the same error at different times: imports alone differ by a second on a busy machine.
# If a silent rank exited first, torchrun would end local rank 0 before it prints. When rank 0 has
# exited, torchrun ends the ranks that wait. 4 s were too short where two worlds shared two cores.
WAIT_FOR_FIRST_RANK_S = 10.0

log = get_logger("nanotrain.train")


def main(argv: Sequence[str] | None = None) -> int:
    """Train with the settings of a command line.

    Args:
        argv: arguments after the program name; None for `sys.argv[1:]`.

    Returns:
        The exit code: 0 on success, 2 for a user error, 130 for an interrupt.
    """
    reporter = Reporter.of(os.environ)
    try:
        line = parse(sys.argv[1:] if argv is None else argv)
        text = reply(line)
        if text is not None and reporter.is_first_local:
            print(text)
        if line.help_topic is None:
            loaded = load_line(line)  # also for a text: a layout that cannot train is refused
            if text is None:
                train(loaded, reporter)
    except NanotrainError as error:
        is_common = not isinstance(error, LocalFault | ReportedFault)
        if is_common and not reporter.is_first_local:
            time.sleep(WAIT_FOR_FIRST_RANK_S)
        return report(error)
    # before the first step, or the second Ctrl-C: the training handles the first
    except KeyboardInterrupt:
        if reporter.is_first_local:
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def pretrain(config: Config) -> "RunHistory":
    """Train with a configuration made in Python, in this process: `nanotrain.pretrain(config)`.

    Under torchrun this process is one rank. The run is that of a command line with the same
    settings.

    Returns:
        The files of the run folder: metrics by column, checkpoints, samples.

    Raises:
        NanotrainError: an error that a command line would report.
    """
    from nanotrain.report.history import RunHistory

    loaded = load_object(config)
    train(loaded, Reporter.of(os.environ))
    return RunHistory.read(RunFolder.of(loaded.config).path)


def train(loaded: Loaded, reporter: Reporter) -> None:
    """Train a configuration and its origins on this rank; a failure is noted in the run folder."""
    with recording(RunFolder.of(loaded.config).path, reporter):
        _train(loaded, reporter)


def _train(loaded: Loaded, reporter: Reporter) -> None:
    """Check the start of this rank, claim the run folder, and train."""
    require_one_task(os.environ)
    world_size = _world_size(os.environ.get("WORLD_SIZE", "1"))
    loaded = with_recorded_layout(loaded, world_size)
    validate_start(loaded.config, world_size, expected_dp=loaded.data_parallel_size)
    prepare_environment()
    with importing_torch():
        from nanotrain.comm.device import set_arithmetic
        from nanotrain.comm.parallel_context import Launch
        from nanotrain.train.checks import Start, run_checks
        from nanotrain.train.open_and_train import open_and_train

    launch = Launch.of(os.environ)
    is_first = launch.is_first
    # all ranks log the same
    start_logging(is_first=is_first, level=logging.INFO if is_first else logging.ERROR)
    for note in loaded.notes:
        log.info("%s", note)
    start = Start(loaded.config, launch)
    run_checks(start)
    set_arithmetic(loaded.config)
    with claimed(RunFolder.of(loaded.config), is_first=is_first):
        outlive_output("training goes on, its steps are in metrics.jsonl")
        open_and_train(loaded, start=start, reporter=reporter)


@contextmanager
def claimed(folder: RunFolder, *, is_first: bool) -> Iterator[None]:
    """Make the run folder and lock it on the first rank.

    An error before the run's first file removes a new folder.

    Raises:
        EnvironmentFault: it cannot be written, another job has it, or it has files that are not a
            run's.
    """
    is_new = not os.path.lexists(folder.path)
    folder.require_writable(probes=False)  # `check_folders` did
    if is_first:  # the others would race with it for the lock file
        folder.require_own()
    with lock_run(folder.path) if is_first else nullcontext():
        try:
            yield
        except BaseException:
            if is_new:
                _remove_empty(folder, is_first=is_first)
            raise


def _remove_empty(folder: RunFolder, *, is_first: bool) -> None:
    """Remove a run folder that holds nothing but the lock file of the first rank."""
    with suppress(OSError):  # the folder has other files
        if is_first and os.listdir(folder.path) == [LOCK_NAME]:
            (folder.path / LOCK_NAME).unlink()
        folder.path.rmdir()


def _world_size(text: str) -> int:
    if not re.fullmatch("[0-9]{1,7}", text) or int(text) < 1:
        raise EnvironmentFault(
            f"WORLD_SIZE is {text!r}", why="it is the number of ranks", fix="start with torchrun"
        )
    return int(text)


def prepare_environment() -> None:
    """Set variables that libraries read when torch is imported, unless they are set."""
    # Spinning idle OpenMP threads take cores from the other ranks: measured 10x on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # OpenMP starts as many threads as the machine has cores; a container may have fewer
    if core_limit() is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    # torch's profiler prints a line for its own tracing tools whenever it starts and stops; its
    # errors are exceptions.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
