"""What the ranks of a run noted when an attempt failed: failures/ and hang-report.json.

RankFailure       the error that ended a rank, in failures/rank-00003.json
Reporter          which process reports an error that all ranks raise
recording         note the error of a block in the run folder
HangRecord        the ranks that the others waited for, in hang-report.json
read_failures, read_hang   both of a folder, without those of an earlier attempt
remove_cured      once the run has gone on in the same processes

A file of a rank is replaced by that of its next failure. Where all ranks raise one error, the first
rank notes it; an error of one rank alone is noted by that rank.
"""

import json
import platform
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanotrain.errors import ConfigErrors, EnvironmentFault, LocalFault, NanotrainError
from nanotrain.runs.files import write_text
from nanotrain.runs.lock import LOCK_NAME, InUse
from nanotrain.untrusted import object_of, parse_json, plain_text, read_file

FOLDER = "failures"
HANG = "hang-report.json"
MAX_TEXT = 2000  # characters of a text that is kept
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class RankFailure:
    """The error that ended a rank."""

    rank: int
    host: str
    time_s: float  # seconds since the epoch
    kind: str  # class of the error
    what: str
    why: str = ""
    fix: str = ""
    is_foreseen: bool = False  # whether it is a NanotrainError

    @classmethod
    def of(cls, error: Exception, *, rank: int) -> "RankFailure":
        """The failure of this process; `why` of an unforeseen error is its place in the code."""
        host = platform.node()
        now = time.time()
        kind = type(error).__name__
        if isinstance(error, NanotrainError):
            what = error.what
            if isinstance(error, ConfigErrors):
                what = "; ".join(map(str, error.errors))
            texts = {"what": what, "why": error.why, "fix": error.fix}
            kept = {name: text[:MAX_TEXT] for name, text in texts.items()}
            return cls(rank, host, now, kind, is_foreseen=True, **kept)
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        return cls(rank, host, now, kind, str(error)[:MAX_TEXT], why=place)

    @property
    def text(self) -> str:
        """The failure as one line."""
        texts = [self.what.strip().partition("\n")[0], self.why.partition("\n")[0]]
        return f"{self.kind}: {': '.join(text for text in texts if text)}"


@dataclass(frozen=True)
class HangRank:
    """A rank that the others waited for."""

    rank: int
    host: str
    state: str  # as in hang-report.txt: lost, stopped, no reply, running, ...


@dataclass(frozen=True)
class HangRecord:
    """A hang report for programs."""

    time_s: float  # seconds since the epoch
    headline: str
    ranks: tuple[HangRank, ...]  # that the others waited for; empty if none can be named

    def write(self, folder: Path) -> None:
        """Replace the record in a run folder."""
        write_text(folder / HANG, json.dumps(asdict(self)) + "\n")


@dataclass
class Reporter:
    """The part of this process in the report of an error that all ranks raise.

    The first rank notes the error in the run folder, the first rank of a machine prints it at once.
    """

    rank: int  # with which the process was started
    is_first: bool
    is_first_local: bool

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Reporter":
        """Read torchrun's variables; values that are no ranks are refused later.

        >>> Reporter.of({"RANK": "3", "LOCAL_RANK": "0"})
        Reporter(rank=3, is_first=False, is_first_local=True)
        """
        text = environment.get("RANK", "0")
        rank = int(text) if text.isdecimal() else 0
        is_first_local = environment.get("LOCAL_RANK", "0") == "0"
        return cls(rank, is_first=rank == 0, is_first_local=is_first_local)

    def take_over(self) -> None:
        """Report from now on: the ranks before this one have left a run of one machine."""
        self.is_first = True
        self.is_first_local = True


@contextmanager
def recording(folder: Path, reporter: Reporter) -> Iterator[None]:
    """Note the error of the block in a run folder that is there; the error goes on."""
    try:
        yield
    except InUse:  # the folder is another run's
        raise
    except Exception as error:
        is_common = isinstance(error, NanotrainError) and not isinstance(error, LocalFault)
        if reporter.is_first or not is_common:
            write_failure(folder, RankFailure.of(error, rank=reporter.rank))
        raise


def is_run_folder(folder: Path) -> bool:
    """Whether a run has locked a folder; any other may be somebody else's."""
    return (folder / LOCK_NAME).is_file()


def write_failure(folder: Path, failure: RankFailure) -> None:
    """Write the failure of a rank into the folder of a run; the disk may be what failed."""
    if not is_run_folder(folder):
        return
    with suppress(EnvironmentFault, OSError):
        (folder / FOLDER).mkdir(exist_ok=True)
        write_text(_failure_path(folder, failure.rank), json.dumps(asdict(failure)))


def read_failures(folder: Path, *, since_s: float = 0.0) -> list[RankFailure]:
    """The failures of an attempt, the earliest first; damaged files are left out.

    Args:
        folder: run folder.
        since_s: when the attempt began, in seconds since the epoch.
    """
    failures = []
    for path in sorted((folder / FOLDER).glob("rank-*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            failures.append(_failure_of(_object_in(path)))
    recent = [failure for failure in failures if failure.time_s >= since_s]
    return sorted(recent, key=lambda failure: (failure.time_s, failure.rank))


def read_hang(folder: Path, *, since_s: float = 0.0) -> HangRecord | None:
    """The hang report of an attempt; None if it wrote none."""
    try:
        values = _object_in(folder / HANG)
        ranks = tuple(_hang_rank_of(entry) for entry in values["ranks"])
        record = HangRecord(float(values["time_s"]), plain_text(values["headline"]), ranks)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if record.time_s >= since_s else None


def remove_cured(folder: Path, *, members: Iterable[int]) -> None:
    """Remove the notes of a cured fault, by which a later failure would be judged.

    Args:
        folder: run folder.
        members: ranks that are left, with the numbers of their starts.
    """
    kept = {_failure_path(folder, rank) for rank in members}
    left = set((folder / FOLDER).glob("rank-*.json")) - kept
    for path in (folder / HANG, *left):
        with suppress(OSError):
            path.unlink()


def _failure_path(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"rank-{rank:05d}.json"


def hosts_of(failures: Sequence[RankFailure]) -> tuple[str, ...]:
    """The hosts of failures, without repetitions."""
    return tuple(dict.fromkeys(failure.host for failure in failures))


def _object_in(path: Path) -> dict[str, Any]:
    content = read_file(path, follows_links=False, most=MAX_BYTES)
    return object_of(parse_json(content), path.name)


def _failure_of(values: dict[str, Any]) -> RankFailure:
    texts = {name: plain_text(values[name]) for name in ("host", "kind", "what", "why", "fix")}
    return RankFailure(
        rank=int(values["rank"]),
        time_s=float(values["time_s"]),
        is_foreseen=values["is_foreseen"] is True,
        **texts,
    )


def _hang_rank_of(values: dict[str, Any]) -> HangRank:
    return HangRank(int(values["rank"]), plain_text(values["host"]), plain_text(values["state"]))
