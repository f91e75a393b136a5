"""A run folder as data: metrics by column, configuration, environment, checkpoints and samples.

A report must open whatever a crash left behind, so a missing or damaged file is an empty part and a
line that cannot be read is skipped. Steps that were repeated after a resume appear once, as the
last run of them.
"""

import math
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain.config.schema import unnest, with_current_keys
from nanotrain.errors import EnvironmentFault
from nanotrain.runs.folder import RunFolder
from nanotrain.untrusted import (
    LARGEST,
    MAX_NAME,
    finite_number,
    object_of,
    parse_json,
    parse_yaml,
    plain_text,
    read_file,
    read_rows,
    whole_number,
)

# A run whose metrics have not grown for this long is not running any more, unless one of its steps
# takes longer.
RUNNING_S = 120.0
MAX_SETTINGS_BYTES = 1 << 18  # of config.yaml and environment.json, which have 10 and 20 kB
MAX_RANKS = 200_000
MAX_COLUMNS, MAX_VALUES = 1000, 1 << 25
MAX_SAMPLES, MAX_STARTS = 100, 10_000
_STEPS_TO_WAIT = 5


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder of a run."""

    name: str
    num_bytes: int
    modified_s: float  # seconds since the epoch


@dataclass(frozen=True)
class Start:
    """A process group that trained in the folder."""

    step: int  # the newest step before it
    time_s: float  # seconds since the epoch
    world_size: int
    # settings that differ from the start before: key -> (value before, value)
    changed: dict[str, Any]


@dataclass(frozen=True)
class RunHistory:
    """The contents of a run folder."""

    folder: Path
    columns: dict[str, np.ndarray]  # name -> [steps] fp64, NaN where a step does not have it
    # router -> [steps, experts] tokens per expert; empty for a dense model
    load: dict[str, np.ndarray]
    config: dict[str, Any]  # key "section.name" -> value
    environment: dict[str, Any]
    checkpoints: tuple[Checkpoint, ...]
    samples: tuple[dict[str, Any], ...]  # {"step", "text"}, one per step
    starts: tuple[Start, ...]
    repeated_s: tuple[float, ...]  # seconds of every step that was trained again after a restart
    stages: tuple[tuple[str, int, int], ...]  # data stages: name, first and last step
    modified_s: float  # last change of the metrics, seconds since the epoch; 0 without metrics

    @classmethod
    def read(cls, folder: Path) -> "RunHistory":
        """Read a run folder.

        Raises:
            EnvironmentFault: it is not a run folder.
        """
        run = RunFolder(folder)
        if not (folder / "config.yaml").is_file() and not run.metrics.is_file():
            raise EnvironmentFault(
                f"{folder} is not a run folder",
                why="it has neither config.yaml nor metrics.jsonl",
                fix="name the folder that a run printed as `run folder`",
            )
        rows, environment = _Rows(run.metrics), _mapping(folder / "environment.json")
        repeated = (
            row.get("step_time_s") for row in read_rows(folder / "metrics-superseded.jsonl")
        )
        samples: dict[int, dict[str, Any]] = {}
        for row in read_rows(folder / "samples.jsonl"):
            if _is_step(row.get("step")) and isinstance(row.get("text"), str):
                samples[row["step"]] = {"step": row["step"], "text": plain_text(row["text"])}
                if len(samples) > MAX_SAMPLES:
                    del samples[next(iter(samples))]
        return cls(
            folder=folder,
            columns=rows.columns,
            load=rows.load,
            config=_settings(_mapping(folder / "config.yaml")),
            environment={
                name: fact
                for name, fact in environment.items()
                if name not in FACTS or FACTS[name](fact)
            },
            checkpoints=tuple(_checkpoints(run.checkpoints)),
            samples=tuple(samples.values()),
            starts=tuple(_starts(folder / "starts.jsonl")),
            repeated_s=tuple(
                float(seconds or 0)
                for seconds in repeated
                if seconds is None or _is_number(seconds)
            ),
            stages=tuple(islice(_stages(rows.stages), MAX_SAMPLES)),
            modified_s=run.metrics.stat().st_mtime if run.metrics.is_file() else 0.0,
        )

    @property
    def name(self) -> str:
        """The name of the folder."""
        return plain_text(self.folder.resolve().name)

    @property
    def world_size(self) -> int:
        """Ranks of the newest process group; 1 where unknown."""
        return int(self.environment.get("world_size", 1))

    @property
    def num_steps(self) -> int:
        """Rows of the metrics."""
        return len(self.column("step"))

    @property
    def last_step(self) -> int:
        """The newest step; 0 before the first."""
        return int(self.column("step")[-1]) if self.num_steps else 0

    @property
    def hours(self) -> np.ndarray:
        """[steps] training time up to each step, in hours; without validation, saving and pauses."""
        return np.cumsum(np.nan_to_num(self.column("step_time_s"))) / 3600

    def column(self, name: str) -> np.ndarray:
        """[steps] a metric; all NaN where no step has it."""
        return self.columns.get(name, np.full(len(self.columns.get("step", ())), np.nan))

    def last(self, name: str) -> float | None:
        """The newest finite value of a metric."""
        values = self.column(name)
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else None

    def typical(self, name: str, num_rows: int) -> float | None:
        """The median of the finite values of a metric in the newest rows."""
        values = self.column(name)[-num_rows:]
        finite = values[np.isfinite(values)]
        return float(np.median(finite)) if len(finite) else None

    def state(self, now_s: float | None = None) -> str:
        """ "finished", "running" or "stopped"; running means that the metrics still grow."""
        target = self.config.get("train.train_iters")
        if isinstance(target, int) and self.last_step >= target:
            return "finished"
        quiet = (time.time() if now_s is None else now_s) - self.modified_s
        patience = max(RUNNING_S, _STEPS_TO_WAIT * (self.last("step_time_s") or 0.0))
        return "running" if quiet < patience else "stopped"


def find_runs(folder: Path) -> list[RunHistory]:
    """The runs in the subfolders of a folder, newest change first; of a run folder that run."""
    inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    candidates = [folder] if (folder / "config.yaml").is_file() else inside
    runs = [RunHistory.read(path) for path in candidates if (path / "config.yaml").is_file()]
    return sorted(runs, key=lambda run: -run.modified_s)


def _starts(path: Path) -> Iterator[Start]:
    for row in islice(read_rows(path), MAX_STARTS):
        with suppress(KeyError, TypeError, ValueError):  # of another version, or damaged
            settings = object_of(_plain(row["changed"]), "changed")
            changed = {key: (before, now) for key, (before, now) in settings.items()}
            step, size = (
                whole_number(row["step"], "step"),
                whole_number(row["world_size"], "world_size"),
            )
            yield Start(step, finite_number(row["time_s"], "time_s"), size, changed)


def _mapping(path: Path) -> dict[str, Any]:
    """The values of a YAML or JSON file by key, as they can be shown; empty for a file that cannot
    be read.
    """
    try:
        content = read_file(path, follows_links=False, most=MAX_SETTINGS_BYTES)
        read = (
            parse_json(content, allow_nan=True) if path.suffix == ".json" else parse_yaml(content)
        )
    except (OSError, ValueError):
        return {}
    return _plain(read) if isinstance(read, dict) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {plain_text(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    is_small = isinstance(value, int) and abs(value) <= LARGEST
    return value if value is None or is_small or isinstance(value, float) else plain_text(value)


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    try:
        return unnest(with_current_keys(values))
    except (AttributeError, TypeError):  # a section that is a value too
        return {}


def _size(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= LARGEST


# What other modules read of environment.json; entries that are something else are left out.
FACTS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("parameters", "active_parameters"), _size),
    "world_size": lambda value: type(value) is int and 1 <= value <= MAX_RANKS,
    "memory": lambda value: isinstance(value, dict) and all(map(_size, value.values())),
    "origins": lambda value: (
        isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    ),
    "packages": lambda value: isinstance(value, dict),
    "command": lambda value: isinstance(value, list),
}


@lru_cache(4 * MAX_COLUMNS)
def _label(name: str) -> str:
    """A name that a chart shows, which reads elements in it."""
    return plain_text(name[:MAX_NAME]).replace("<", "\u2039")


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= LARGEST


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < sys.float_info.max)


class _Rows:
    """The rows of metrics.jsonl, by column; numbers of columns and values are bounded."""

    def __init__(self, path: Path) -> None:
        columns: dict[str, array[float]] = {}
        stages: list[str] = []
        loads: list[np.ndarray] = []
        routers: list[str] = []
        for count, row in enumerate(row for row in read_rows(path) if _is_step(row.get("step"))):
            values = {
                _label(name): value for name, value in unnest(row).items() if _is_number(value)
            }
            for name in values if len(columns) < MAX_COLUMNS else ():
                if name not in columns:
                    columns[name] = array("d", [math.nan]) * count
            for name, column in columns.items():
                column.append(values.get(name, math.nan))
            stage = row.get("data_stage")
            stages.append(
                sys.intern(plain_text(stage[:MAX_NAME])) if isinstance(stage, str) else ""
            )
            # none, or not of numbers
            with (
                np.errstate(over="ignore"),
                suppress(KeyError, TypeError, AttributeError, ValueError, OverflowError),
            ):
                routers, load = list(row["moe"]["load"]), list(row["moe"]["load"].values())
                loads.append(np.array(load, dtype=np.float32))
            if (count + 1) * len(columns) > MAX_VALUES:
                break
        steps = np.array(columns.get("step", ()))
        _, last = np.unique(steps[::-1], return_index=True)
        kept = len(steps) - 1 - last  # the last row of each step, in order of steps
        self.columns = {name: np.array(column)[kept] for name, column in columns.items()}
        self.stages = [(stages[row], int(steps[row])) for row in kept if stages[row]]
        self.load: dict[str, np.ndarray] = {}
        if (
            0 < len(loads) == len(steps)
            and len({load.shape for load in loads}) == 1
            and loads[0].ndim == 2
        ):
            by_router = np.stack(loads, axis=1)[:, kept]
            if by_router.size and by_router.min() >= 0 and np.isfinite(by_router).all():
                self.load = dict(zip(map(_label, routers), by_router, strict=True))


def _stages(stages: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    for name, group in groupby(stages, key=itemgetter(0)):
        steps = [step for _, step in group]
        yield name, steps[0], steps[-1]


def _checkpoints(folder: Path) -> Iterator[Checkpoint]:
    for path in sorted(folder.glob("step-*")):
        if path.is_dir() and path.name.removeprefix("step-").isdigit():
            with suppress(FileNotFoundError):  # the run may be deleting it
                files = [file.stat() for file in path.iterdir() if file.is_file()]
                yield Checkpoint(
                    path.name, sum(file.st_size for file in files), path.stat().st_mtime
                )
