"""Worker processes of the loader and of `prepare`.

    WorkerContext          fork-server processes that do not execute the user's script again
    without_main_module    the same for processes of another context
    exit_with_parent       no worker outlives its trainer

A fork-server process imports the parent's main module, for objects that are defined there. Here no
worker needs one, and a script without `if __name__ == "__main__"` would start its training again.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

from nanotrain.system import describe_exit


@contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the main module from processes started in the block, which would import it.

    An object that is defined there cannot be pickled for them.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # has no file, so there is nothing to import
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _WorkerProcess(ForkServerProcess):
    """A process of the fork server without the main module of its parent."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with without_main_module():
            return ForkServerProcess._Popen(process_obj)


class WorkerContext(ForkServerContext):
    """A context of multiprocessing whose processes do not import the main module.

    Args:
        preload: modules that the fork server imports once, unless it runs already.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        super().__init__()
        self.set_forkserver_preload(list(preload))
        self.started: list[_WorkerProcess] = []

    def Process(self, *args: Any, **options: Any) -> _WorkerProcess:  # type: ignore[override]
        """A process, which is started later."""
        process = _WorkerProcess(*args, **options)
        self.started.append(process)
        return process

    def how_ended(self) -> str:
        """How a worker ended: its exit code, or else its signal; empty if all run."""
        codes = [process.exitcode for process in self.started]
        ended = [code for code in codes if code]
        if not ended:
            return ""
        # a pool that lost one of its processes ends the others by SIGTERM
        first = [code for code in ended if code != -signal.SIGTERM]
        return describe_exit(max(first or ended))


def exit_with_parent() -> None:
    """Make this worker process exit when its trainer exits, even if the trainer is killed.

    The parent in the process tree is the fork server, which lives as long as its workers. Without
    this, a killed trainer would leave both behind (observed).
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a worker process only"

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
