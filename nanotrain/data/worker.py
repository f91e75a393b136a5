"""`exit_with_parent`, for the worker processes of the loader and of `prepare`."""

import multiprocessing
import os
import threading
from multiprocessing import connection


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
