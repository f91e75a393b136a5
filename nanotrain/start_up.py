"""Begin and end of a process: signals, no garbage collection where it only costs time.

require_folders            at the start of a command
without_collection         while many objects are made
stop_signals               that save and end a run
importing_torch            during `import torch`, which saves 0.4 s and more
end_without_collection     at the end of the process
"""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from nanotrain.errors import EnvironmentFault


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP, which a closed terminal sends; not where it is ignored, as under `nohup`."""
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up)


@contextmanager
def without_collection() -> Iterator[None]:
    """Make many objects in the block, or in the decorated function, of which none is garbage.

    Collections visit all of them repeatedly: a manifest of 16,384 chunks was parsed in 0.54 s and received in
    0.26 s, without collections in 0.33 s and 0.05 s (measured).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def importing_torch() -> Iterator[None]:
    """Import in the block without garbage collection, unless torch is imported already.

    Torch and what is built on it are half a million objects of which none is garbage. Collections visit all of them
    repeatedly: a third of the CPU time of `import torch`. What was imported is then left out of later collections.

    Raises:
        EnvironmentFault: as `require_folders`.
    """
    if "torch" in sys.modules:
        yield
        return
    require_folders()
    with without_collection():
        try:
            yield
        finally:
            gc.freeze()


def require_folders() -> None:
    """Check that temporary files can be made, and that the working folder exists.

    torch and the start of processes require the first; without the second, torch's first product of matrices ends the
    process.

    Raises:
        EnvironmentFault: no folder for temporary files can be written, or the working folder was deleted.
    """
    try:
        os.getcwd()
    except OSError as error:
        why = f"{error.strerror}: it was deleted, or its disk is gone"
        fix = "enter one: cd, or cd . if it was made again"
        raise EnvironmentFault("the working folder cannot be found", why=why, fix=fix) from None
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        fix = "mount a folder that can be written at /tmp, or name one with TMPDIR"
        raise EnvironmentFault("there is no folder for temporary files", why=str(error.strerror), fix=fix) from None


def end_without_collection() -> None:
    """Skip the last collection of the interpreter, which visits all objects (0.4 s of CPU); call it last.

    Not where Triton was imported: what is not collected its bindings print as leaks, 25 lines per process (Triton 3.9).
    """
    if "triton" in sys.modules:
        gc.unfreeze()
        return
    gc.disable()
    gc.freeze()
