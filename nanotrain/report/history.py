"""A run folder as data: metrics by column, configuration, environment, checkpoints and samples.

A report must open whatever a crash left behind, so a missing or damaged file is an empty part and a line that cannot be
read is skipped. Steps that were repeated after a resume appear once, as the last run of them.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nanotrain.config.schema import unnest, with_current_keys
from nanotrain.errors import EnvironmentFault
from nanotrain.runs.folder import RunFolder
from nanotrain.untrusted import LARGEST, finite_number, object_of, parse_json, whole_number

# A run whose metrics have not grown for this long is not running any more, unless one of its steps takes longer.
RUNNING_S = 120.0
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
    changed: dict[str, Any]  # settings that differ from the start before: key -> (value before, value)


@dataclass(frozen=True)
class RunHistory:
    """The contents of a run folder."""

    folder: Path
    columns: dict[str, np.ndarray]  # name -> [steps] fp64, NaN where a step does not have it
    load: dict[str, np.ndarray]  # router -> [steps, experts] tokens per expert; empty for a dense model
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
        rows = list({row["step"]: row for row in _json_lines(run.metrics) if _is_step(row.get("step"))}.values())
        rows.sort(key=lambda row: row["step"])
        repeated = (row.get("step_time_s") for row in _json_lines(folder / "metrics-superseded.jsonl"))
        samples = {str(row.get("step")): row for row in _json_lines(folder / "samples.jsonl") if "text" in row}
        return cls(
            folder=folder,
            columns=_columns(rows),
            load=_loads(rows),
            config=unnest(with_current_keys(_mapping(folder / "config.yaml"))),
            environment=_mapping(folder / "environment.json"),
            checkpoints=tuple(_checkpoints(run.checkpoints)),
            samples=tuple(samples.values()),
            starts=tuple(_starts(folder / "starts.jsonl")),
            repeated_s=tuple(float(seconds or 0) for seconds in repeated if seconds is None or _is_number(seconds)),
            stages=tuple(_stages(rows)),
            modified_s=run.metrics.stat().st_mtime if run.metrics.is_file() else 0.0,
        )

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def world_size(self) -> int:
        """Ranks of the newest process group; 1 where unknown."""
        size = self.environment.get("world_size")
        return size if isinstance(size, int) and size > 0 else 1

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


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(ValueError):  # truncated by a crash
                row = parse_json(line, allow_nan=True)
                if isinstance(row, dict):
                    yield row


def _starts(path: Path) -> Iterator[Start]:
    for row in _json_lines(path):
        with suppress(KeyError, TypeError, ValueError):  # of another version, or damaged
            changed = {key: (before, now) for key, (before, now) in object_of(row["changed"], "changed").items()}
            step, size = whole_number(row["step"], "step"), whole_number(row["world_size"], "world_size")
            yield Start(step, finite_number(row["time_s"], "time_s"), size, changed)


def _mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        read = parse_json(text, allow_nan=True) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return read if isinstance(read, dict) else {}


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= LARGEST


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < sys.float_info.max)


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    flat = [{k: v for k, v in unnest(row).items() if _is_number(v)} for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    return {name: np.array([row.get(name, np.nan) for row in flat], dtype=float) for name in names}


def _loads(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    loads = [row["moe"].get("load", {}) if isinstance(row.get("moe"), dict) else {} for row in rows]
    if not loads or not all(isinstance(load, dict) and load.keys() == loads[0].keys() for load in loads):
        return {}
    try:
        return {name: np.array([load[name] for load in loads], dtype=float) for name in loads[0]}
    except (ValueError, TypeError, OverflowError):  # lists of other lengths, or not of numbers
        return {}


def _stages(rows: list[dict[str, Any]]) -> Iterator[tuple[str, int, int]]:
    named = (row for row in rows if isinstance(row.get("data_stage"), str))
    for name, group in groupby(named, key=itemgetter("data_stage")):
        steps = [row["step"] for row in group]
        yield name, steps[0], steps[-1]


def _checkpoints(folder: Path) -> Iterator[Checkpoint]:
    for path in sorted(folder.glob("step-*")):
        if path.is_dir() and path.name.removeprefix("step-").isdigit():
            with suppress(FileNotFoundError):  # the run may be deleting it
                files = [file.stat() for file in path.iterdir() if file.is_file()]
                yield Checkpoint(path.name, sum(file.st_size for file in files), path.stat().st_mtime)
