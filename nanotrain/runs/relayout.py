"""Requests for another layout of a running job, made by `nanotrain relayout`.

    RUN/relayout.request   what is asked for; the job removes it at a logged step
    RUN/relayout.jsonl     what was done: step, arguments, ranks, bytes, seconds

    with_layout               a configuration with other settings of its layout, all rules checked
    require_change            the check that it is another one
    request_layout            write a request
    read_request, remove_request, record_layout   the life of a request, in this order
    with_recorded_layout      the layout of the run at a later start

The request is removed before it is carried out: a run that fails in between goes on from its newest
checkpoint, in the layout of its command line, and does not try again.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded
from nanotrain.config.rules.check import collect_errors, validate_for_world
from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import flat_values, read_config
from nanotrain.config.user_paths import refuse_variables
from nanotrain.errors import ConfigError, ErrorCollector, NanotrainError
from nanotrain.runs.files import disk_errors, open_append, write_all
from nanotrain.runs.folder import RunFolder
from nanotrain.runs.request import read_request_file, write_request
from nanotrain.untrusted import (
    list_of,
    object_of,
    read_rows,
    text_of,
    whole_number,
)

REQUEST, DONE = "relayout.request", "relayout.jsonl"
# sections whose settings change where and how tensors are computed, not the model or its data
_SECTIONS = ("parallel.", "memory.")
_KEYS = ("train.micro_batch_size",)
_LEFT_OUT = ("parallel.auto_layout",)


def is_layout_key(key: str) -> bool:
    """Whether a setting belongs to the layout.

    >>> is_layout_key("parallel.tensor_model_parallel_size"), is_layout_key("optim.lr")
    (True, False)
    """
    return key not in _LEFT_OUT and (key in _KEYS or key.startswith(_SECTIONS))


def with_layout(config: Config, arguments: Sequence[str], *, world_size: int) -> Config:
    """A complete configuration with other settings of its layout, all rules checked.

    Args:
        config: configuration of the run.
        arguments: flags as for training.
        world_size: ranks of the new layout.

    Raises:
        ConfigError: a flag that is unknown or changes what is trained, or a layout that fits
            neither the model nor the ranks.
    """
    from nanotrain.config.merge import merge_settings  # Hydra's grammar takes 0.2 s

    if config.checkpoint.memory_checkpoint_interval:
        raise ConfigError(
            "a run with --memory-checkpoint-interval keeps its layout",
            why="its checkpoints in the memory of the hosts are of the ranks that it has",
            fix="stop it, and start it in the other layout: a checkpoint loads in any",
        )
    if config.train.inprocess_restart:
        raise ConfigError(
            "a run with --inprocess-restart keeps its layout",
            why="a rank that is started again has the command line of the run",
            fix="stop it, and start it in the other layout: a checkpoint loads in any",
        )
    line = parse(arguments)
    errors = ErrorCollector()
    errors.errors += line.errors.errors
    _require_layout_flags(line.megatron or line.choices or line.help_topic is not None, errors)
    for setting in line.settings:
        if not is_layout_key(setting.key):
            _require_layout_flags(True, errors, text=setting.text)
    errors.raise_errors()
    values = merge_settings(flat_values(config), line.settings)
    changed, bad_keys = read_config(values, errors=errors, expand=refuse_variables)
    changed, _ = reset_unused(changed, explicit=line.explicit, errors=errors)
    if not bad_keys:
        collect_errors(changed, to_train=True, errors=errors)
    errors.raise_errors()
    validate_for_world(changed, world_size, expected_dp=line.data_parallel_size)
    return changed


def _require_layout_flags(is_other: Any, errors: ErrorCollector, *, text: str = "") -> None:
    """Collect the error of an argument that is no setting of the layout."""
    if is_other:
        error = ConfigError(
            f"{text or 'an argument'} is no setting of the layout",
            why="a running job keeps what it trains: model, data, optimizer and precision",
            fix="name sizes, sharding, overlap or recomputation, or --micro-batch-size; "
            "a start may change the others",
        )
        errors.errors.append(error)


def changed_keys(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that differ: key -> (before, after), as JSON."""
    old = layout_of(before)
    new = layout_of(after)
    return {key: (old[key], value) for key, value in new.items() if value != old[key]}


def require_change(before: Config, after: Config, *, ranks: tuple[int, int]) -> None:
    """Check that a layout differs from the layout of the run.

    Args:
        before: configuration of the run.
        after: configuration with the layout that is asked for.
        ranks: numbers of ranks before and after.

    Raises:
        ConfigError: nothing changes.
    """
    if ranks[0] == ranks[1] and not changed_keys(before, after):
        raise ConfigError(
            "the run has this layout",
            why="neither a setting of the layout nor the number of ranks changes",
            fix="name one that changes, as --tensor-model-parallel-size 2",
        )


def layout_of(config: Config) -> dict[str, Any]:
    """The settings of the layout by key, as JSON."""
    values = _as_json(flat_values(config))
    return {key: value for key, value in values.items() if is_layout_key(key)}


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dict(values), default=str))
    return plain


@dataclass(frozen=True)
class LayoutRequest:
    """A request for another layout."""

    arguments: tuple[str, ...]  # flags as for training
    ranks: int | None  # ranks that stay, the first ones; None: all
    number: str  # a random number, by which the record names it


def request_layout(folder: Path, arguments: Sequence[str], *, ranks: int | None) -> bool:
    """Ask the job of a run for another layout, from its next logged step on.

    Returns:
        Whether a request that the job has not taken is replaced.
    """
    replaces = (folder / REQUEST).exists()
    write_request(folder / REQUEST, {"arguments": list(arguments), "ranks": ranks})
    return replaces


def read_request(folder: Path) -> LayoutRequest | None:
    """The request in a run folder, where it stays; None without one.

    Raises:
        ConfigError: it cannot be read, and was removed.
    """
    return read_request_file(
        folder / REQUEST, _parse_request, error=ConfigError, command="nanotrain relayout"
    )


def _parse_request(body: Mapping[str, Any]) -> LayoutRequest:
    """The request in a file; ValueError for a wrong field."""
    arguments = [text_of(word, "arguments") for word in list_of(body.get("arguments"), "arguments")]
    ranks = body.get("ranks")
    if ranks is not None:
        ranks = whole_number(ranks, "ranks", low=1)
    return LayoutRequest(tuple(arguments), ranks, text_of(body.get("number", ""), "number"))


def remove_request(folder: Path, request: LayoutRequest) -> None:
    """Remove a request, unless another has taken its place meanwhile."""
    if read_request(folder) == request:
        (folder / REQUEST).unlink(missing_ok=True)


def record_layout(
    folder: Path, numbers: Mapping[str, Any], *, before: Config, after: Config
) -> None:
    """Append a finished relayout to a file that every later start of the run reads.

    Args:
        folder: run folder.
        numbers: `step`, `arguments`, `ranks`, and numbers for people.
        before: configuration that has ended.
        after: configuration that goes on.

    Raises:
        EnvironmentFault: the disk is full or the folder cannot be written.
    """
    changed = changed_keys(before, after)
    row = {**numbers, "changed": changed, "layout_before": layout_of(before)}
    with open_append(folder / DONE) as file, disk_errors(folder / DONE):
        write_all(file, json.dumps(row, default=str).encode() + b"\n")
        os.fsync(file.fileno())


def with_recorded_layout(loaded: Loaded, world_size: int) -> Loaded:
    """The configuration of a start in the layout that the run has now.

    The layout of the last `nanotrain relayout` is taken where the command line still has the layout
    of before. A command line with another one, or another number of ranks, wins.
    """
    config = loaded.config
    options = config.checkpoint
    rows = list(read_rows(RunFolder.of(config).path / DONE))
    if not rows or not options.auto_resume or options.load is not None:
        return loaded
    step = rows[-1].get("step")
    try:
        for row in _rows_that_apply(rows):
            config = _apply_relayout(config, row)
        validate_for_world(config, world_size, expected_dp=loaded.data_parallel_size)
    except (NanotrainError, ValueError) as error:
        why = error.what if isinstance(error, NanotrainError) else str(error)
        note = f"the layout of the command line is used, not that of the relayout at step {step}"
        return replace(loaded, notes=(*loaded.notes, f"{note}: {why}"))
    changes = changed_keys(loaded.config, config)
    if not changes:
        return loaded
    text = ", ".join(f"{key} {now}" for key, (_, now) in changes.items())
    note = f"the layout is that of the relayout at step {step}: {text}"
    origins = loaded.origins | dict.fromkeys(changes, f"nanotrain relayout at step {step}")
    return replace(loaded, config=config, origins=origins, notes=(*loaded.notes, note))


def _rows_that_apply(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The relayouts since a command line with another layout won, oldest first.

    Raises:
        ValueError: a row is damaged.
    """
    chosen: list[Mapping[str, Any]] = []
    layout: dict[str, Any] = {}  # the settings that the chosen rows have changed, as they are then
    for row in rows:
        before = object_of(row.get("layout_before"), "layout_before")
        if any(before.get(key) != value for key, value in layout.items()):
            chosen = []
            layout = {}
        chosen.append(row)
        for key, pair in object_of(row.get("changed"), "changed").items():
            _, after = list_of(pair, key)
            layout[key] = after
    return chosen


def _apply_relayout(config: Config, row: Mapping[str, Any]) -> Config:
    """The configuration after one relayout.

    Raises:
        ValueError: it has another layout than the run had before, or the row is damaged.
        ConfigError: the layout does not fit.
    """
    values = _as_json(flat_values(config))
    changed = object_of(row.get("changed"), "changed")
    new_values = {}
    for key, pair in changed.items():
        before, after = list_of(pair, key)
        if not is_layout_key(key) or values.get(key) != before:
            raise ValueError(f"the command line has another {key} than the run had then")
        new_values[key] = after
    errors = ErrorCollector()
    moved, _ = read_config(values_of(config, new_values), errors=errors, expand=refuse_variables)
    collect_errors(moved, to_train=True, errors=errors)
    errors.raise_errors()
    return moved


def values_of(config: Config, changed: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration by key, some of them replaced."""
    return {**flat_values(config), **changed}
