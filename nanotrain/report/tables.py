"""The tables of a report, as HTML: runs, configuration, checkpoints and environment. All text is
escaped.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from nanotrain.quantities import describe_bytes, describe_count
from nanotrain.report.history import RunHistory, Start

Row = Sequence[str]
TASKS = re.compile(r"evaluation\.task/(.+)/accuracy")
SHOWN_ELSEWHERE = ("origins", "memory", "layout", "parameters", "active_parameters", "packages")
NEWEST_ROWS = 100  # whose median is the speed


def html_table(header: Row, rows: Iterable[Row], *, marked: frozenset[str] = frozenset()) -> str:
    """A table; cells of rows whose first cell is in `marked` are highlighted."""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"]
    for row in rows:
        mark = ' class="differs"' if row[0] in marked else ""
        lines.append("<tr>" + "".join(f"<td{mark}>{escape(cell)}</td>" for cell in row) + "</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def summary_of(run: RunHistory) -> dict[str, str]:
    """One row of a list of runs, by column."""
    target = run.config.get("train.train_iters")
    return {
        "run": run.name,
        "state": run.state(),
        "step": f"{run.last_step:,}/{target:,}"
        if isinstance(target, int)
        else f"{run.last_step:,}",
        "loss": _number(run.last("loss"), ".4f"),
        "validation": _number(run.last("valid_loss"), ".4f"),
        "tokens/s": _number(run.last("tokens_per_second"), ",.0f"),
        "hours": f"{run.hours[-1]:.2f}" if run.num_steps else "-",
        "tokens": _number(run.last("consumed_tokens"), ",.0f"),
        "saved": _bytes(sum(checkpoint.num_bytes for checkpoint in run.checkpoints)),
        "last change": _time(run.modified_s) if run.modified_s else "-",
    }


def headline_of(run: RunHistory) -> dict[str, tuple[str, str]]:
    """What one asks first about a run: by label the value, and its unit or a remark; without what
    is unknown.
    """
    environment, target, last = run.environment, run.config.get("train.train_iters"), run.last
    total, active = (environment.get(name) for name in ("parameters", "active_parameters"))
    valid, hours = last("valid_loss"), run.hours[-1] if run.num_steps else 0.0
    again = (
        f"{len(run.repeated_s):,} steps again, {sum(run.repeated_s) / 3600:.2f} hours"
        if run.repeated_s
        else ""
    )
    since_h = (run.modified_s - run.starts[0].time_s) / 3600 if run.starts else 0.0
    tasks = {
        match[1]: last(name) or 0.0 for name in run.columns if (match := TASKS.fullmatch(name))
    }
    facts = {
        "Progress": (
            f"{run.last_step:,} steps",
            f"of {target:,}, {run.state()}" if isinstance(target, int) else "",
        ),
        "Parameters": (
            _count(total),
            f"{_count(active)} active per token" if active != total else "",
        ),
        "Tokens": (_count(last("consumed_tokens")), "read in training"),
        "Device": (f"{run.world_size:,} x {environment.get('device', 'unknown')}", ""),
        "Layout": (str(environment.get("layout", "")).partition(", ")[2] or "-", ""),
        "Training loss": (_number(last("loss"), ".4f"), "nats per token"),
        "Validation loss": (_number(valid, ".4f"), "nats per token"),
        "Perplexity": (_number(valid and math.exp(min(valid, 700)), ",.2f"), "of validation"),
        "Bits per byte": (_number(last("valid_bits_per_byte"), ".4f"), "of validation"),
        **{f"Task {name}": (f"{share:.1%}", "right answers") for name, share in tasks.items()},
        "Throughput": (
            _number(run.typical("tokens_per_second", NEWEST_ROWS), ",.0f"),
            "tokens per second",
        ),
        "MFU": (_number(run.typical("mfu", NEWEST_ROWS), ".1%"), "of the device's peak"),
        "Training time": (
            f"{hours:,.2f} hours",
            f"{since_h:,.2f} since the first start" if since_h else "",
        ),
        "Restarts": (f"{max(0, len(run.starts) - 1):,}", again),
    }
    return {label: fact for label, fact in facts.items() if fact[0] != "-"}


def headline(runs: Sequence[RunHistory]) -> str:
    """The summary: cards of one run, or a table with a column per run."""
    each = [headline_of(run) for run in runs]
    labels = dict.fromkeys(label for items in each for label in items)
    rows = {label: [items.get(label, ("-", "")) for items in each] for label in labels}
    if len(runs) > 1:
        cells = (
            [label, *(f"{value} {note}".strip() for value, note in row)]
            for label, row in rows.items()
        )
        return html_table(["", *(run.name for run in runs)], cells)
    cards = (
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for label, ((value, note),) in rows.items()
    )
    return f'<dl class="cards">{"".join(cards)}</dl>'


def config_differences(runs: Sequence[RunHistory]) -> dict[str, list[str]]:
    """Keys whose values differ between runs, with the value of each run; "" where a run does not
    have the key.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config)
    values = {
        key: [_text(run.config[key]) if key in run.config else "" for run in runs] for key in keys
    }
    return {key: row for key, row in values.items() if len(set(row)) > 1}


def config_table(runs: Sequence[RunHistory]) -> str:
    """Every setting, its value per run and where the value comes from; settings that differ are
    highlighted.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing = frozenset(config_differences(runs))
    header, rows = ["setting"], {key: [key] for key in keys}
    for run in runs:
        header += [run.name, "set by"]
        for key, row in rows.items():
            row += [_text(run.config.get(key)), run.environment.get("origins", {}).get(key, "")]

    ordered = sorted(
        rows.values(), key=lambda row: (row[0] not in differing, {*row[2::2]} <= {"", "default"})
    )
    return html_table(header, ordered, marked=differing)


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
    """Every start of a run: when, on how many ranks, and which settings it changed; empty for a run
    of one start.
    """
    rows = [
        (f"{each.step:,}", _time(each.time_s), str(each.world_size), changes_text(each))
        for each in run.starts
    ]
    return (
        html_table(("after step", "started", "ranks", "changed settings"), rows)
        if len(rows) > 1
        else ""
    )


def changes_text(start: Start) -> str:
    """The settings that a start changed."""
    return ", ".join(
        f"{key} {_text(before)} -> {_text(now)}" for key, (before, now) in start.changed.items()
    )


def environment_table(runs: Sequence[RunHistory]) -> str:
    """Command line, versions, device and revision of each run."""
    flat = [_flat_environment(run.environment) for run in runs]
    keys = dict.fromkeys(key for environment in flat for key in environment)
    return html_table(
        ["", *(run.name for run in runs)],
        ([key, *(env.get(key, "") for env in flat)] for key in keys),
    )


def _flat_environment(environment: dict[str, Any]) -> dict[str, str]:
    """By name and by package; without what other tables and charts show."""
    flat = {name: value for name, value in environment.items() if name not in SHOWN_ELSEWHERE}
    if "command" in flat:
        flat["command"] = " ".join(map(str, flat["command"]))
    return {name: _text(value) for name, value in (flat | environment.get("packages", {})).items()}


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
