"""Begin and end of a process: standard streams, signals, no garbage collection where it only costs time.

open_closed_streams      before any file is opened
outlive_terminals        go on where a terminal hangs up
without_collection       while many objects are made
stop_signals             that save and end a run
importing_torch          during `import torch`, which saves 0.4 s and more
end_without_collection   at the end of the process
"""

import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def open_closed_streams() -> None:
    """Send standard streams that were closed (`2>&-`) to nowhere.

    The next files to be opened would get their numbers, and what a library prints would be written into them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(opened, True)  # by the ranks
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


class _Terminal(io.FileIO):
    """A terminal; once it has hung up, what is written to it is dropped."""

    def write(self, data: Any) -> int:
        """Write bytes; the first ones after the end of the terminal redirect its number to nowhere."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def outlive_terminals() -> None:
    """Let standard output and error that are terminals hang up without an error.

    A closed ssh session hangs up its terminal. A run would end at the next line that it prints, before it has saved.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            stream.flush()
            raw = _Terminal(stream.fileno(), "w", closefd=False)
            text = io.TextIOWrapper(io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors)
            text.reconfigure(line_buffering=True, write_through=stream.write_through)
            setattr(sys, name, text)


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
    """
    if "torch" in sys.modules:
        yield
        return
    with without_collection():
        try:
            yield
        finally:
            gc.freeze()


def end_without_collection() -> None:
    """Skip the last collection of the interpreter, which visits all objects (0.4 s of CPU); call it last.

    Not where Triton was imported: what is not collected its bindings print as leaks, 25 lines per process (Triton 3.9).
    """
    if "triton" in sys.modules:
        gc.unfreeze()
        return
    gc.disable()
    gc.freeze()
