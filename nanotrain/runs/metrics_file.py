"""metrics.jsonl: one JSON object per step, appended; rows of steps that are repeated are set aside, never erased.

metrics.jsonl               the rows of the run, in order of steps
metrics-superseded.jsonl    rows of steps that a later start repeated, in the order in which they were set aside
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanotrain.errors import EnvironmentFault
from nanotrain.runs.files import disk_errors, disk_fault, open_append, write_all, write_bytes
from nanotrain.untrusted import LARGEST, read_file


class MetricsFile:
    """Appends rows; notices a full disk, a removed folder, and another job that writes the file.

    Args:
        path: metrics.jsonl.
        step: the step that the run starts from; later rows are set aside.

    Raises:
        EnvironmentFault: the file cannot be written.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self.path = path
        set_aside_after(path, step)
        self._file = open_append(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one row.

        Raises:
            EnvironmentFault: the disk is full, or the file was replaced by another process.
            FolderVanished: the run folder was removed.
        """
        line = json.dumps(row).encode() + b"\n"
        with disk_errors(self.path, needed=len(line)):
            self._require_same_file()
            start = os.fstat(self._file.fileno()).st_size
            try:
                write_all(self._file, line)
            except OSError:
                os.ftruncate(self._file.fileno(), start)
                raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _require_same_file(self) -> None:
        try:
            if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path)):
                return
            what = "replaced"
        except FileNotFoundError:
            if not self.path.parent.is_dir():
                raise
            what = "removed"
        raise EnvironmentFault(
            f"{self.path} was {what} by another process",
            why="two jobs in one run folder overwrite each other's files",
            fix="end the other job, then start this one again; it resumes from its newest checkpoint",
        )


def set_aside_after(path: Path, step: int) -> None:
    """Move the rows of steps after `step`, and rows that cannot be read, to metrics-superseded.jsonl.

    Raises:
        EnvironmentFault: a file cannot be written; metrics.jsonl is then unchanged.
    """
    try:
        content = read_file(path, follows_links=False, most=LARGEST)
    except FileNotFoundError:
        return
    except OSError as error:
        raise disk_fault(error, path) from None
    except ValueError as error:
        raise EnvironmentFault(f"{path} cannot be read", why=str(error), fix="remove it") from None
    kept: list[bytes] = []
    superseded: list[bytes] = []
    for line in content.splitlines(keepends=True):
        is_kept = line.endswith(b"\n") and _step_of(line) <= step
        (kept if is_kept else superseded).append(line.rstrip(b"\n") + b"\n")
    if not superseded:
        return
    aside = path.with_name("metrics-superseded.jsonl")
    with open_append(aside) as file, disk_errors(aside, needed=len(content)):
        write_all(file, b"".join(superseded))
        os.fsync(file.fileno())
    write_bytes(path, b"".join(kept))


def _step_of(line: bytes) -> float:
    """The step of a row; infinite for a row that cannot be read, as one truncated by a crash."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return float(step) if isinstance(step, int | float) else math.inf
