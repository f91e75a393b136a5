"""metrics.jsonl: one JSON object per step, appended; rows of repeated steps are set aside.

metrics.jsonl               the rows of the run, in order of steps, each with a checksum of the rest
metrics-superseded.jsonl    rows of steps that a later start repeated, as they were set aside

A checkpoint has the seal of the rows before it (`MetricsSeal`), so that a resume notices rows that
are missing or changed, from the first to the last one.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from nanotrain.errors import EnvironmentFault
from nanotrain.log import get_logger
from nanotrain.quantities import count_of
from nanotrain.runs.files import disk_errors, disk_fault, open_append, write_all, write_bytes
from nanotrain.untrusted import LARGEST, object_of, read_file, read_rows, whole_number

log = get_logger(__name__)
_SUM = re.compile(rb', "crc32": "([0-9a-f]{8})"}\n\Z')  # checksum of the row without this field


@dataclass(frozen=True)
class MetricsSeal:
    """The rows of metrics.jsonl when a checkpoint was written."""

    first_step: int  # step of the first row
    rows: int
    crc32: int  # checksum of all their bytes

    @classmethod
    def from_json(cls, value: object) -> "MetricsSeal":
        """The seal in a checkpoint.

        Raises:
            ValueError: a field is missing or has an invalid value.
        """
        row = object_of(value, "objects.metrics")
        return cls(**{name: whole_number(row.get(name), name) for name in cls.__annotations__})


class Sealer:
    """Computes the seal of a growing metrics.jsonl; reads only what was appended since.

    Args:
        path: metrics.jsonl.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_again()

    def _start_again(self) -> None:
        """Forget the file that was read so far."""
        self._inode = -1
        self._size = 0
        self._seal = MetricsSeal(0, rows=0, crc32=0)

    def seal(self) -> MetricsSeal | None:
        """The seal of the rows so far; None without a row or a file that can be read."""
        try:
            with self._path.open("rb") as file:
                self._add(file)
        except OSError:
            return None
        return self._seal if self._seal.rows else None

    def _add(self, file: BinaryIO) -> None:
        """Add the rows that were appended; all of them if the file was replaced."""
        inode = os.fstat(file.fileno()).st_ino
        if inode != self._inode:
            self._start_again()
            self._inode = inode
        file.seek(self._size)
        content = file.read()
        self._size += len(content)
        first = self._seal.first_step
        if self._seal.rows == 0 and content:
            step = _step_of(content.partition(b"\n")[0])
            first = int(step) if math.isfinite(step) else 0
        self._seal = MetricsSeal(
            first,
            rows=self._seal.rows + content.count(b"\n"),
            crc32=crc32(content, self._seal.crc32),
        )


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
        text = json.dumps(row).encode()
        line = text[:-1] + b', "crc32": "%08x"}\n' % crc32(text)
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
        """Check that the path still names the open file."""
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
            fix="end the other job, then start this one again; it resumes from its newest "
            "checkpoint",
        )


def last_step(path: Path) -> int:
    """The highest step with a row in metrics.jsonl; 0 without rows."""
    steps = [row.get("step") for row in read_rows(path)]
    return max((step for step in steps if type(step) is int), default=0)


def set_aside_after(path: Path, step: int) -> None:
    """Move rows after `step`, and rows that cannot be read, to metrics-superseded.jsonl.

    Raises:
        EnvironmentFault: a file cannot be written; metrics.jsonl is then unchanged.
    """
    content = _content_of(path)
    rows = [(line, _step_of(line)) for line in content.splitlines(keepends=True)]
    kept = [line for line, number in rows if line.endswith(b"\n") and number <= step]
    superseded = []
    for line, number in rows:
        if number > step or not line.endswith(b"\n"):
            superseded.append(line.rstrip(b"\n") + b"\n")
    if not superseded:
        return
    aside = path.with_name("metrics-superseded.jsonl")
    with open_append(aside) as file, disk_errors(aside, needed=len(content)):
        write_all(file, b"".join(superseded))
        os.fsync(file.fileno())
    write_bytes(path, b"".join(kept))


def _content_of(path: Path) -> bytes:
    """The content of metrics.jsonl; empty without the file."""
    try:
        return read_file(path, follows_links=False, most=LARGEST)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise disk_fault(error, path) from None
    except ValueError as error:
        raise EnvironmentFault(f"{path} cannot be read", why=str(error), fix="remove it") from None


def warn_of_changes(path: Path, *, step: int, seal: MetricsSeal | None = None) -> None:
    """Warn once of rows up to `step` that are not as they were written, or are missing.

    Args:
        path: metrics.jsonl.
        step: the step that a start goes on from.
        seal: seal in the checkpoint of that step; None in older versions.
    """
    content = _content_of(path)
    rows = [(line, _step_of(line)) for line in content.splitlines(keepends=True)]
    kept = [line for line, number in rows if line.endswith(b"\n") and number <= step]
    faults = _faults(rows, step=step, first=None if seal is None else seal.first_step)
    is_sealed = seal is not None and crc32(b"".join(kept)) == seal.crc32
    if seal is not None and not is_sealed:
        bare = sum(1 for line in kept if _SUM.search(line) is None)
        if bare:
            faults.append(f"{count_of(bare, 'row')} without a checksum")
        if not faults:
            faults.append(f"its rows up to step {step} are not those of the checkpoint")
    if faults:
        log.warning("%s was changed: %s", path, "; ".join(faults))


def _faults(rows: Sequence[tuple[bytes, float]], *, step: int, first: int | None) -> list[str]:
    """Complete rows that are not as written, and missing ones between `first` and `step`."""
    changed = _changed_lines(rows)
    steps = {step_number for _, step_number in rows}
    if first is None:
        first = int(min({*steps, step + 1}))
    missing = [step_number for step_number in range(first, step + 1) if step_number not in steps]
    faults = []
    if changed:
        count = count_of(len(changed), "row", verb="is")
        faults.append(f"{count} not as written, first line {changed[0]}")
    if missing:
        count = count_of(len(missing), "row", verb="is")
        faults.append(f"{count} missing, first step {missing[0]}")
    return faults


def _changed_lines(rows: Sequence[tuple[bytes, float]]) -> list[int]:
    """The numbers of complete lines that are not as they were written.

    Older versions wrote no checksum. A killed writer may leave half a row at the end.
    """
    changed = []
    has_sums = False
    for number, (line, step) in enumerate(rows, start=1):
        checksum = _SUM.search(line)
        if checksum is not None:
            has_sums = True
            is_as_written = crc32(line[: checksum.start()] + b"}") == int(checksum[1], 16)
        else:
            is_as_written = not has_sums and step < math.inf
        if line.endswith(b"\n") and not is_as_written:
            changed.append(number)
    return changed


def _step_of(line: bytes) -> float:
    """The step of a row; infinite for a row that cannot be read, as one truncated by a crash."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return float(step) if isinstance(step, int | float) else math.inf
