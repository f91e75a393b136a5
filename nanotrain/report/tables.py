"""The tables of a report, as HTML: runs, configuration, checkpoints and environment.

All text is escaped.
"""

import json
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, NamedTuple

from nanotrain.quantities import describe_bytes, describe_count
from nanotrain.report.history import RunHistory, Start

Row = Sequence[str]
TASKS = re.compile(r"evaluation\.task/(.+)/accuracy")
SHOWN_ELSEWHERE = (
    "origins",
    "memory",
    "layout",
    "parameters",
    "active_parameters",
    "packages",
)
NUMBER = re.compile(r"[\d.e+-]+")  # the weight of a corpus
SHORT_REVISION = 10  # characters
WIDE_CARD = 40  # a card with more characters is a row of its own
NEWEST_ROWS = 100  # whose median is the speed


def html_table(header: Row, rows: Iterable[Row], *, marked: frozenset[str] = frozenset()) -> str:
    """A table; cells of rows whose first cell is in `marked` are highlighted."""
    names = [f"<th>{escape(name)}</th>" for name in header]
    lines = [f"<tr>{''.join(names)}</tr>"]
    for row in rows:
        opening = '<td class="differs">' if row[0] in marked else "<td>"
        cells = [f"{opening}{escape(cell)}</td>" for cell in row]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def summary_of(run: RunHistory) -> dict[str, str]:
    """One row of a list of runs, by column."""
    target = run.config.get("train.train_iters")
    step = f"{run.last_step:,}"
    if isinstance(target, int):
        step = f"{step}/{target:,}"
    hours = "-"
    if run.num_steps:
        hours = f"{run.hours[-1]:.2f}"
    last_change = "-"
    if run.modified_s:
        last_change = _time(run.modified_s)
    saved_bytes = sum(checkpoint.num_bytes for checkpoint in run.checkpoints)
    return {
        "run": run.name,
        "state": run.state(),
        "step": step,
        "loss": _number(run.last("loss"), ".4f"),
        "validation": _number(run.last("valid_loss"), ".4f"),
        "tokens/s": _number(run.last("tokens_per_second"), ",.0f"),
        "hours": hours,
        "tokens": _number(run.last("consumed_tokens"), ",.0f"),
        "saved": _bytes(saved_bytes),
        "last change": last_change,
    }


class Fact(NamedTuple):
    """A value of the summary, and its unit or a remark."""

    value: str
    note: str


UNKNOWN = Fact("-", "")


def headline_of(run: RunHistory) -> dict[str, Fact]:
    """The main facts of a run, by label; unknown facts are left out."""
    facts = {"Progress": progress_of(run)}
    facts |= size_facts(run)
    facts |= loss_facts(run)
    facts |= speed_facts(run)
    facts |= origin_facts(run)
    return {label: fact for label, fact in facts.items() if fact.value != "-"}


def progress_of(run: RunHistory) -> Fact:
    """The steps of a run, and its state."""
    target = run.config.get("train.train_iters")
    note = f"of {target:,}, {run.state()}" if isinstance(target, int) else ""
    return Fact(f"{run.last_step:,} steps", note)


def size_facts(run: RunHistory) -> dict[str, Fact]:
    """Facts on the size of a run: parameters, tokens, device and layout."""
    environment = run.environment
    total = environment.get("parameters")
    active = environment.get("active_parameters")
    active_note = f"{_count(active)} active per token" if active != total else ""
    layout = str(environment.get("layout", "")).partition(", ")[2]
    device = environment.get("device", "unknown")
    return {
        "Parameters": Fact(_count(total), active_note),
        "Tokens": Fact(_count(run.last("consumed_tokens")), "read in training"),
        "Device": Fact(f"{run.world_size:,} x {device}", ""),
        "Layout": Fact(layout or "-", ""),
    }


def loss_facts(run: RunHistory) -> dict[str, Fact]:
    """Losses of training and validation, and right answers of tasks."""
    valid_loss = run.last("valid_loss")
    perplexity = None
    if valid_loss is not None:
        perplexity = math.exp(min(valid_loss, 700))
    bits = run.last("valid_bits_per_byte")
    facts = {
        "Training loss": Fact(_number(run.last("loss"), ".4f"), "nats per token"),
        "Validation loss": Fact(_number(valid_loss, ".4f"), "nats per token"),
        "Perplexity": Fact(_number(perplexity, ",.2f"), "of validation"),
        "Bits per byte": Fact(_number(bits, ".4f"), "of validation"),
    }
    for name in run.columns:
        if match := TASKS.fullmatch(name):
            share = run.last(name) or 0.0
            chance = run.last(f"evaluation.task/{match[1]}/chance")
            by_chance = "" if chance is None else f", {chance:.1%} by chance"
            facts[f"Task {match[1]}"] = Fact(f"{share:.1%}", f"right answers{by_chance}")
    return facts


def speed_facts(run: RunHistory) -> dict[str, Fact]:
    """Throughput, training time and restarts."""
    hours = run.hours[-1] if run.num_steps else 0.0
    since_start = ""
    if run.starts:
        since_h = (run.modified_s - run.starts[0].time_s) / 3600
        since_start = f"{since_h:,.2f} since the first start" if since_h else ""
    repeated = ""
    if run.repeated_s:
        repeated_h = sum(run.repeated_s) / 3600
        repeated = f"{len(run.repeated_s):,} steps again, {repeated_h:.2f} hours"
    num_restarts = max(0, sum(not start.in_place for start in run.starts) - 1)
    throughput = run.typical("tokens_per_second", NEWEST_ROWS)
    mfu = run.typical("mfu", NEWEST_ROWS)
    goodput = run.last("goodput")
    return {
        "Throughput": Fact(_number(throughput, ",.0f"), "tokens per second"),
        "MFU": Fact(_number(mfu, ".1%"), "of the device's peak"),
        "Goodput": Fact(_number(goodput, ".1%"), "steps that count, of all time"),
        "Training time": Fact(f"{hours:,.2f} hours", since_start),
        "Restarts": Fact(f"{num_restarts:,}", repeated),
    }


def origin_facts(run: RunHistory) -> dict[str, Fact]:
    """Device hours of the run, and its origin: data, revision, host and command."""
    environment = run.environment
    device_hours = "-"
    if run.num_steps:
        device_hours = f"{run.hours[-1] * run.world_size:,.2f}"
    revision = str(environment.get("git_revision") or "-")[:SHORT_REVISION]
    command = environment.get("command") or ["-"]
    corpora = corpora_of(run)
    return {
        "Cost": Fact(device_hours, "device hours of training"),
        "Data": Fact(", ".join(corpora) or "-", ""),
        "Revision": Fact(revision, "git"),
        "Host": Fact(str(environment.get("host", "-")), "of rank 0"),
        "Command": Fact(shlex.join(map(str, command)), ""),
    }


def corpora_of(run: RunHistory) -> list[str]:
    """The names of the training corpora, without weights and folders."""
    paths = run.config.get("data.data_path") or run.config.get("data.train_data_path") or []
    if run.config.get("data.mock_data"):
        return ["random tokens"]
    if not isinstance(paths, list):
        return []
    names = [str(path).rstrip("/").rpartition("/")[2] for path in paths]
    return [name for name in names if not NUMBER.fullmatch(name)]


def headline(runs: Sequence[RunHistory]) -> str:
    """The summary: cards of one run, or a table with a column per run."""
    if len(runs) == 1:
        cards = [fact_card(label, fact) for label, fact in headline_of(runs[0]).items()]
        return f'<dl class="cards">{"".join(cards)}</dl>'
    facts_of_runs = [headline_of(run) for run in runs]
    labels: dict[str, None] = {}
    for facts in facts_of_runs:
        labels |= dict.fromkeys(facts)
    rows = []
    for label in labels:
        row = [label]
        for facts in facts_of_runs:
            fact = facts.get(label, UNKNOWN)
            row.append(f"{fact.value} {fact.note}".strip())
        rows.append(row)
    return html_table(["", *(run.name for run in runs)], rows)


def fact_card(label: str, fact: Fact) -> str:
    """A card of the summary."""
    value = f"{escape(fact.value)}<small>{escape(fact.note)}</small>"
    kind = ' class="wide"' if len(fact.value) > WIDE_CARD else ""
    return f"<div{kind}><dt>{escape(label)}</dt><dd>{value}</dd></div>"


def config_keys(runs: Sequence[RunHistory]) -> list[str]:
    """The keys of all settings, in the order of the runs."""
    keys: dict[str, None] = {}
    for run in runs:
        keys |= dict.fromkeys(run.config)
    return list(keys)


def config_differences(runs: Sequence[RunHistory]) -> dict[str, list[str]]:
    """Keys whose values differ between runs, with the value of each run.

    The value is "" where a run does not have the key.
    """
    differences = {}
    for key in config_keys(runs):
        values = [_text(run.config[key]) if key in run.config else "" for run in runs]
        if len(set(values)) > 1:
            differences[key] = values
    return differences


def config_table(runs: Sequence[RunHistory]) -> str:
    """Every setting, its value per run and its origin; settings that differ are highlighted.

    Settings that differ come first, then those that a file or a command line set.
    """
    differing = frozenset(config_differences(runs))
    header = ["setting"]
    for run in runs:
        header += [run.name, "set by"]
    rows = []
    defaults = set()
    for key in config_keys(runs):
        row = [key]
        origins = set()
        for run in runs:
            origin = run.environment.get("origins", {}).get(key, "")
            row += [_text(run.config.get(key)), origin]
            origins.add(origin)
        rows.append(row)
        if origins <= {"", "default"}:
            defaults.add(key)
    rows.sort(key=lambda row: (row[0] not in differing, row[0] in defaults))
    return html_table(header, rows, marked=differing)


def checkpoint_table(run: RunHistory) -> str:
    """Name, size and time of every checkpoint."""
    rows = [
        (saved.name, _bytes(saved.num_bytes), _time(saved.modified_s)) for saved in run.checkpoints
    ]
    return html_table(("checkpoint", "size", "written"), rows) if rows else "<p>none</p>"


def stage_table(run: RunHistory) -> str:
    """The data stages and their steps; empty without."""
    rows = [(name, f"{first:,} to {last:,}") for name, first, last in run.stages]
    return html_table(("data stage", "steps"), rows) if rows else ""


def starts_table(run: RunHistory) -> str:
    """Every start of a run: when, on how many ranks, and which settings it changed.

    Empty for a run of one start.
    """
    if len(run.starts) < 2:
        return ""
    rows = []
    for start in run.starts:
        world_size = str(start.world_size)
        when = _time(start.time_s)
        if start.in_place:
            when += ", in place"
        rows.append((f"{start.step:,}", when, world_size, changes_text(start)))
    return html_table(("after step", "started", "ranks", "changed settings"), rows)


def changes_text(start: Start) -> str:
    """The settings that a start changed."""
    changes = []
    for key, (before, now) in start.changed.items():
        changes.append(f"{key} {_text(before)} -> {_text(now)}")
    return ", ".join(changes)


def environment_table(runs: Sequence[RunHistory]) -> str:
    """Command line, versions, device and revision of each run."""
    environments = [_flat_environment(run.environment) for run in runs]
    keys: dict[str, None] = {}
    for environment in environments:
        keys |= dict.fromkeys(environment)
    rows = []
    for key in keys:
        values = [environment.get(key, "") for environment in environments]
        rows.append([key, *values])
    return html_table(["", *(run.name for run in runs)], rows)


def _flat_environment(environment: dict[str, Any]) -> dict[str, str]:
    """The entries of environment.json as text by name, without entries that other tables show."""
    flat = {}
    for name, value in environment.items():
        if name == "command":
            value = " ".join(map(str, value))
        if name not in SHOWN_ELSEWHERE:
            flat[name] = _text(value)
    for package, version in environment.get("packages", {}).items():
        flat[package] = _text(version)
    return flat


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _count(number: Any) -> str:
    return describe_count(number) if isinstance(number, int | float) else "-"


def _bytes(count: int) -> str:
    return describe_bytes(count) if count else "-"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
