"""A save in the background: a thread per rank writes the staged shard; that of the first rank commits after all others.

    rank k   thread: write and fsync the shard -> written-0000k.json        (or the reason of a failure)
    rank 0   thread: the same -> wait for all reports -> manifest -> rename -> delete the oldest

The threads do not communicate over process groups, whose collectives belong to the training loop; they exchange
files in the folder of the save, which all ranks share.
"""

import threading
from collections.abc import Callable
from pathlib import Path


class BackgroundSave:
    """The thread of one rank's save.

    Args:
        write: writes the shard and reports it; on the first rank it also commits and returns the checkpoint's folder.
        is_cancelled: passed to `write`; true once the save should be given up.
    """

    def __init__(self, write: Callable[[Callable[[], bool]], Path | None]) -> None:
        self._cancelled = threading.Event()
        self._result: Path | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint-writer", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def result(self) -> Path | None:
        """Wait for the thread; returns what `write` did.

        Raises:
            Exception: the error of `write`.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def cancel(self) -> None:
        """Cancel the save and wait for the thread, which may be writing."""
        self._cancelled.set()
        self._thread.join()

    def give_up(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the thread, then cancel it; returns whether it has succeeded."""
        self._thread.join(timeout_s)
        self._cancelled.set()
        return not self._thread.is_alive() and self._error is None

    def _run(self, write: Callable[[Callable[[], bool]], Path | None]) -> None:
        try:
            self._result = write(self._cancelled.is_set)
        except Exception as error:  # raised again by `result`, in the training loop
            self._error = error
