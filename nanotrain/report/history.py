"""A run folder as data: metrics by column, configuration, environment, checkpoints and samples.

A report must open whatever a crash left behind, so a missing or damaged file is an empty part and a
line that cannot be read is skipped. Steps that were repeated after a resume appear once, as the
last run of them.
"""

import math
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
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
MAX_SETTINGS_BYTES = 1 << 18  # limit of config.yaml and environment.json, which have 10 and 20 kB
MAX_RANKS = 200_000
MAX_COLUMNS = 1000
MAX_VALUES = 1 << 25
MAX_SAMPLES = 100
MAX_STARTS = 10_000
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
    # whether running processes went on, in another layout or with another stage of the data
    in_place: bool = False


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
        rows = _Rows(run.metrics)
        modified_s = 0.0
        if run.metrics.is_file():
            modified_s = run.metrics.stat().st_mtime
        return cls(
            folder=folder,
            columns=rows.columns,
            load=rows.load,
            config=_settings(_mapping(folder / "config.yaml")),
            environment=read_environment(folder / "environment.json"),
            checkpoints=tuple(_checkpoints(run.checkpoints)),
            samples=tuple(read_samples(folder / "samples.jsonl")),
            starts=tuple(_starts(folder / "starts.jsonl")),
            repeated_s=tuple(read_repeated(folder / "metrics-superseded.jsonl")),
            stages=tuple(islice(_stages(rows.stages), MAX_SAMPLES)),
            modified_s=modified_s,
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
        """[steps] hours of training up to each step, without validation, saving and pauses."""
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
        if now_s is None:
            now_s = time.time()
        step_time_s = self.last("step_time_s") or 0.0
        patience_s = max(RUNNING_S, _STEPS_TO_WAIT * step_time_s)
        return "running" if now_s - self.modified_s < patience_s else "stopped"


def find_runs(folder: Path) -> list[RunHistory]:
    """The runs in the subfolders of a folder, newest change first; of a run folder that run."""
    if (folder / "config.yaml").is_file():
        candidates = [folder]
    elif folder.is_dir():
        candidates = sorted(path for path in folder.iterdir() if path.is_dir())
    else:
        candidates = []
    runs = [RunHistory.read(path) for path in candidates if (path / "config.yaml").is_file()]
    return sorted(runs, key=lambda run: -run.modified_s)


def read_environment(path: Path) -> dict[str, Any]:
    """The facts of environment.json; facts of an unexpected type are left out."""
    facts = _mapping(path)
    if isinstance(facts.get("memory"), dict):
        facts["memory"] = sizes_of(facts["memory"])
    return {name: fact for name, fact in facts.items() if name not in FACTS or FACTS[name](fact)}


def sizes_of(memory: dict[str, Any]) -> dict[str, Any]:
    """The bytes of a memory plan by part, without its remarks, which are texts."""
    return {part: size for part, size in memory.items() if _is_size(size)}


def read_samples(path: Path) -> Iterable[dict[str, Any]]:
    """The newest generated texts, the last one per step."""
    samples: dict[int, dict[str, Any]] = {}
    for row in read_rows(path):
        step = row.get("step")
        text = row.get("text")
        if isinstance(step, int) and _is_step(step) and isinstance(text, str):
            samples[step] = {"step": step, "text": plain_text(text)}
            if len(samples) > MAX_SAMPLES:
                oldest = next(iter(samples))
                del samples[oldest]
    return samples.values()


def read_repeated(path: Path) -> Iterator[float]:
    """The seconds of every step that was trained again; 0 where they are unknown."""
    for row in read_rows(path):
        seconds = row.get("step_time_s")
        if seconds is None:
            yield 0.0
        elif _is_number(seconds):
            yield float(seconds)


def _starts(path: Path) -> Iterator[Start]:
    """The starts of a run; rows of another version and damaged ones are skipped."""
    for row in islice(read_rows(path), MAX_STARTS):
        try:
            start = _start_of(row)
        except (KeyError, TypeError, ValueError):
            continue
        yield start


def _start_of(row: dict[str, Any]) -> Start:
    """The start that a row of starts.jsonl describes."""
    settings = object_of(_plain_value(row["changed"]), "changed")
    changed = {key: (before, now) for key, (before, now) in settings.items()}
    return Start(
        step=whole_number(row["step"], "step"),
        time_s=finite_number(row["time_s"], "time_s"),
        world_size=whole_number(row["world_size"], "world_size"),
        changed=changed,
        in_place=row.get("in_place") is True,
    )


def _mapping(path: Path) -> dict[str, Any]:
    """The values of a YAML or JSON file by key, as they can be shown.

    Empty for a file that cannot be read.
    """
    try:
        content = read_file(path, follows_links=False, most=MAX_SETTINGS_BYTES)
        if path.suffix == ".json":
            values = parse_json(content, allow_nan=True)
        else:
            values = parse_yaml(content)
    except (OSError, ValueError):
        return {}
    return _plain_value(values) if isinstance(values, dict) else {}


def _plain_value(value: Any) -> Any:
    """A value as it can be shown: numbers, lists and mappings, and anything else as plain text."""
    if isinstance(value, dict):
        return {plain_text(key): _plain_value(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain_value(inner) for inner in value]
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, int) and abs(value) <= LARGEST:
        return value
    return plain_text(value)


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a config.yaml by key; empty where it has another form."""
    try:
        return unnest(with_current_keys(values))
    except (AttributeError, TypeError):  # a section that is a value too
        return {}


def _is_size(value: Any) -> bool:
    """Whether a value is a number of bytes or of parameters."""
    return isinstance(value, int | float) and 0 <= value <= LARGEST


def _is_world_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANKS


def _has_sizes(value: Any) -> bool:
    """Whether a value maps names to numbers of bytes."""
    return isinstance(value, dict) and all(map(_is_size, value.values()))


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _has_texts(value: Any) -> bool:
    """Whether a value of a file is a mapping of texts."""
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


# Entries of environment.json that other modules read; entries of another type are left out.
FACTS: dict[str, Callable[[Any], bool]] = {
    "parameters": _is_size,
    "active_parameters": _is_size,
    "world_size": _is_world_size,
    "memory": _has_sizes,
    "origins": _has_texts,
    "packages": _is_mapping,
    "command": _is_list,
}


@lru_cache(4 * MAX_COLUMNS)
def _label(name: str) -> str:
    """A name as a chart shows it; plotly would read HTML elements in it."""
    return plain_text(name[:MAX_NAME]).replace("<", "\u2039")


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= LARGEST


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < sys.float_info.max)


class _Rows:
    """The rows of metrics.jsonl, by column; numbers of columns and values are bounded."""

    def __init__(self, path: Path) -> None:
        self._values: dict[str, array[float]] = {}
        self._stages: list[str] = []
        self._loads: list[np.ndarray] = []
        self._routers: list[str] = []
        rows = (row for row in read_rows(path) if _is_step(row.get("step")))
        for count, row in enumerate(rows):
            self._add(row, count=count)
            if (count + 1) * len(self._values) > MAX_VALUES:
                break
        steps = np.array(self._values.get("step", ()))
        _, last = np.unique(steps[::-1], return_index=True)
        kept = len(steps) - 1 - last  # the last row of each step, in order of steps
        self.columns = {name: np.array(column)[kept] for name, column in self._values.items()}
        self.stages = [(self._stages[row], int(steps[row])) for row in kept if self._stages[row]]
        self.load: dict[str, np.ndarray] = {}
        if self._has_loads(len(steps)):
            by_router = np.stack(self._loads, axis=1)[:, kept]
            if by_router.size and by_router.min() >= 0 and np.isfinite(by_router).all():
                self.load = dict(zip(map(_label, self._routers), by_router, strict=True))

    def _add(self, row: dict[str, Any], *, count: int) -> None:
        """Add a row; new columns start with NaN for the `count` earlier rows."""
        values = {_label(name): value for name, value in unnest(row).items() if _is_number(value)}
        for name in values:
            if name not in self._values and len(self._values) < MAX_COLUMNS:
                self._values[name] = array("d", [math.nan]) * count
        for name, column in self._values.items():
            column.append(values.get(name, math.nan))
        stage = row.get("data_stage")
        name = sys.intern(plain_text(stage[:MAX_NAME])) if isinstance(stage, str) else ""
        self._stages.append(name)
        self._add_load(row)

    def _add_load(self, row: dict[str, Any]) -> None:
        """Add the tokens per expert of a row; none if the row lacks them or has other values."""
        try:
            load = row["moe"]["load"]
            routers = list(load)
            with np.errstate(over="ignore"):
                tokens = np.array(list(load.values()), dtype=np.float32)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
            return
        self._routers = routers
        self._loads.append(tokens)

    def _has_loads(self, num_rows: int) -> bool:
        """Whether every row has tokens per expert, of the same routers and experts."""
        if not self._loads or len(self._loads) != num_rows:
            return False
        shape = self._loads[0].shape
        return len(shape) == 2 and all(load.shape == shape for load in self._loads)


def _stages(stages: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    """The data stages of rows: name, first and last step."""
    for name, group in groupby(stages, key=itemgetter(0)):
        steps = [step for _, step in group]
        yield name, steps[0], steps[-1]


def _checkpoints(folder: Path) -> Iterator[Checkpoint]:
    """The checkpoints of a run that are there; a run may be deleting some."""
    for path in sorted(folder.glob("step-*")):
        if not path.is_dir() or not path.name.removeprefix("step-").isdigit():
            continue
        try:
            files = [file.stat() for file in path.iterdir() if file.is_file()]
            modified_s = path.stat().st_mtime
        except FileNotFoundError:
            continue
        yield Checkpoint(path.name, sum(file.st_size for file in files), modified_s)
