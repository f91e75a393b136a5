"""A lock that the ranks of a machine share."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanotrain.errors import EnvironmentFault
from nanotrain.runs.files import OTHER_FOLDER, open_append
from nanotrain.waiting import named_wait


@contextmanager
def file_lock(path: Path, task: str) -> Iterator[None]:
    """Hold an exclusive lock shared by the ranks of this machine.

    Args:
        path: the file to lock; it is made.
        task: what one rank does alone, for the error.

    Raises:
        EnvironmentFault: the file system has no locks; the ranks would write the same files at the
            same time.
    """
    with open_append(path) as file:  # neither truncated nor followed as a link
        try:
            with named_wait(f"another process holds {path}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise EnvironmentFault(
                f"{path} cannot be locked",
                why=f"{error.strerror}: the ranks would {task} at the same time",
                fix=OTHER_FOLDER,
            ) from None
        yield
