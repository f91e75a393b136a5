"""What worker processes of the loader and of `prepare` have in common: how they fail and how they end."""

import multiprocessing
import os
import threading
from dataclasses import dataclass
from multiprocessing import connection

from nanotrain.errors import DataError


@dataclass(frozen=True)
class Failure:
    """A `DataError` on its way between processes, as plain values: an exception would bring a foreign traceback."""

    what: str
    why: str
    fix: str

    @classmethod
    def of(cls, error: DataError) -> "Failure":
        """Pack an error, in the worker."""
        return cls(error.what, error.why, error.fix)

    def error(self) -> DataError:
        """Unpack it, in the process that asked."""
        return DataError(self.what, why=self.why, fix=self.fix)


def end_with_parent() -> None:
    """Let this process end when the one that asked for it does, even if that one is killed.

    A worker's parent is the fork server, which lives as long as a worker does: left alone, both would outlive a
    killed trainer for ever (seen).
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker was asked for by some process"

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
