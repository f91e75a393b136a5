"""`--rows`: a prediction for every row of a table of measurements.

TSV --read_table--> rows --scenario_of_row--> scenarios --predict--> TSV: id, fits, memory_gib,
step_time_s, ...
"""

import csv
from itertools import product
from pathlib import Path
from typing import NamedTuple

from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.planner.engine import engine_of
from nanotrain.planner.hardware import read_data
from nanotrain.planner.memory import memory_of_rank
from nanotrain.planner.prediction import Prediction, predict
from nanotrain.planner.row_config import Row, scenario_of_row

CHOICES: dict[str, list[str]] = read_data("rows")["open"]  # of cells that a row leaves open
# a table without one of these columns has no row that could be modelled
NEEDED = ("layers", "hidden", "seq")


class RowPrediction(NamedTuple):
    """A line of the output; empty strings where nothing can be said."""

    id: str
    fits: str = ""
    memory_gib: str = ""
    step_time_s: str = ""
    tokens_per_s_per_gpu: str = ""
    mfu: str = ""
    note: str = ""


COLUMNS = RowPrediction._fields


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a TSV file with a header; a row without an id gets its number.

    Raises:
        ConfigError: a file that cannot be read, or is no such table.
    """
    fix = f"it takes a header and tab-separated rows with at least {', '.join(NEEDED)}"
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "") or "it is no text"
        raise ConfigError(f"cannot read {path}", why=why, fix=fix) from None
    rows = list(
        csv.reader((line for line in lines if line.strip()), delimiter="\t", quoting=csv.QUOTE_NONE)
    )
    header = [name.strip().lower() for name in rows[0]] if rows else []
    missing = [name for name in NEEDED if name not in header]
    if missing or len(set(header)) < len(header):
        why = (
            f"the header has no {', '.join(missing)}"
            if missing
            else "columns of its header have the same name"
        )
        raise ConfigError(f"{path} is no table of measurements", why=why, fix=fix)
    for number, cells in enumerate(rows[1:], start=2):
        if len(cells) > len(header):
            what = f"line {number} of {path} has {len(cells)} cells"
            raise ConfigError(what, why=f"the header has {len(header)} columns", fix=fix)
    table = [dict(zip(header, cells, strict=False)) for cells in rows[1:]]
    return [
        {**row, "id": row.get("id") or str(number)} for number, row in enumerate(table, start=1)
    ]


def predict_row(cells: dict[str, str], *, engine: str | None = None) -> RowPrediction:
    """The prediction of a row; one that cannot be modelled has its reason as note.

    Args:
        cells: cells by column.
        engine: name of the engine; None infers it.
    """
    try:
        prediction, assumed = _best(cells, engine=engine)
    except NanotrainError as error:
        return RowPrediction(cells["id"], note=" ".join(f"not modelled: {error}".split()))
    scenario, memory, time = prediction.scenario, prediction.memory, prediction.time
    shown = memory
    if Row(cells).has_flags:  # Megatron-LM logs the bytes of the last rank
        shown = memory_of_rank(scenario, scenario.sizes["pp"] - 1)
        assumed.append("memory of the last pipeline rank")
    return RowPrediction(
        cells["id"],
        fits="yes" if prediction.headroom >= 0 else "no",
        memory_gib=f"{shown.total / 2**30:.3f}",
        step_time_s=f"{time.total:.6g}",
        tokens_per_s_per_gpu=f"{time.tokens_per_s_per_gpu:.6g}",
        mfu=f"{time.mfu:.4f}",
        note="; ".join([f"engine {scenario.engine.name}", *dict.fromkeys(assumed)]),
    )


def _best(cells: dict[str, str], *, engine: str | None) -> tuple[Prediction, list[str]]:
    """The prediction, and what was assumed; of what a row leaves open, the choice with the best
    predicted time.

    Published runs are tuned, so an open micro-batch size or number of virtual stages is chosen as a
    user would, and recomputation only where nothing fits without.
    """
    row, found = Row(cells), list[tuple[Prediction, list[str]]]()
    problem: NanotrainError = ConfigError("no micro-batch size divides the batch")
    names = [name for name in CHOICES if row.leaves_open(name)]
    for values in product(*(CHOICES[name] for name in names)):
        chosen = Row(cells | dict(zip(names, values, strict=True)))
        try:
            scenario = scenario_of_row(chosen, engine=engine)
            if "mbs" in names and row.number("gbs") not in (
                None,
                scenario.config.train.global_batch_size,
            ):
                continue  # a micro-batch size that does not divide it
            prediction = predict(scenario)
        except NanotrainError as error:
            problem = error
            continue
        notes = [f"{name} not stated: {value}" for name, value in zip(names, values, strict=True)]
        found.append((prediction, [*notes, *chosen.assumed]))
    if not found:
        raise problem
    return max(found, key=lambda each: (each[0].headroom >= 0, each[0].time.tokens_per_s_per_gpu))


def run_rows(table: Path, output: Path, *, engine: str | None = None) -> str:
    """Predict a table and write the predictions as TSV; returns a line that says how many rows were
    modelled.

    Raises:
        ConfigError: a file that cannot be read or written, or an unknown engine.
    """
    if engine is not None:
        engine_of(engine)
    predictions = [predict_row(cells, engine=engine) for cells in read_table(table)]
    try:
        output.write_text(
            "".join("\t".join(line) + "\n" for line in (COLUMNS, *predictions)), encoding="utf-8"
        )
    except OSError as error:
        raise ConfigError(
            f"cannot write {output}", why=error.strerror or "", fix="choose another --output"
        ) from None
    modelled = sum(bool(row.memory_gib) for row in predictions)
    return f"{modelled} of {len(predictions)} rows predicted, written to {output}"
