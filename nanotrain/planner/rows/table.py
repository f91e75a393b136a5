"""`--rows`: a prediction for every row of a table of measurements.

TSV --read_table--> rows --scenario_of_row--> scenarios --predict--> TSV: id, fits, memory_gib,
step_time_s, ...
"""

from codecs import BOM_UTF8
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.planner.engine import engine_of
from nanotrain.planner.prediction import Prediction, memory_of_rank, predict
from nanotrain.planner.rows.config import scenario_of_row
from nanotrain.planner.rows.row import Row
from nanotrain.untrusted import read_file, unreadable

MAX_TABLE_BYTES = 1 << 24  # 1,367 published measurements have 0.5 MB

# choices that are tried for columns that a row leaves open
CHOICES = {
    "mbs": ["1", "2", "4", "8"],
    "vp": ["1", "2", "4"],
    "recompute": [
        "none",
        "selective layernorm mla_up_proj moe_act",
        "selective layernorm mla_up_proj mlp moe",
    ],
}
# a table without one of these columns has no row that could be modelled
NEEDED = ("layers", "hidden", "seq")
FIX = f"it takes a header and tab-separated rows with at least {', '.join(NEEDED)}"


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


class RowCandidate(NamedTuple):
    """The prediction of a row with some choices for its open cells."""

    prediction: Prediction
    assumed: list[str]

    @property
    def rank(self) -> tuple[bool, float]:
        """Candidates that fit first, then by throughput."""
        return self.prediction.headroom >= 0, self.prediction.time.tokens_per_s_per_gpu


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a TSV file with a header; a row without an id gets its number.

    Raises:
        ConfigError: a file that cannot be read, or is no such table.
    """
    lines = _read_lines(path)
    rows = [line.split("\t") for line in lines]
    header = [name.strip().lower() for name in rows[0]] if rows else []
    _check_header(path, header)
    table = []
    for number, cells in enumerate(rows[1:], start=1):
        if len(cells) > len(header):
            line = f"line {number + 1} of {path} has {len(cells)} cells"
            raise ConfigError(line, why=f"the header has {len(header)} columns", fix=FIX)
        row = dict(zip(header, cells, strict=False))
        table.append({**row, "id": row.get("id") or str(number)})
    return table


def _read_lines(path: Path) -> list[str]:
    """The lines of a table that are not empty."""
    try:
        content = read_file(path, most=MAX_TABLE_BYTES).removeprefix(BOM_UTF8)
        # the lines of bytes: spreadsheets write U+000B where a cell has several lines
        lines = [line.decode() for line in content.splitlines()]
    except (OSError, ValueError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else unreadable(error)
        raise ConfigError(f"cannot read {path}", why=why, fix=FIX) from None
    return [line for line in lines if line.strip()]


def _check_header(path: Path, header: list[str]) -> None:
    """Check that a table has the needed columns, and no name twice."""
    missing = [name for name in NEEDED if name not in header]
    if missing:
        why = f"the header has no {', '.join(missing)}"
        raise ConfigError(f"{path} is no table of measurements", why=why, fix=FIX)
    if len(set(header)) < len(header):
        why = "columns of its header have the same name"
        raise ConfigError(f"{path} is no table of measurements", why=why, fix=FIX)


def predict_row(cells: dict[str, str], *, engine: str | None = None) -> RowPrediction:
    """The prediction of a row; one that cannot be modelled has its reason as note.

    Args:
        cells: cells by column.
        engine: name of the engine; None infers it.
    """
    try:
        prediction, assumed = _best_candidate(cells, engine=engine)
    except NanotrainError as error:
        return RowPrediction(cells["id"], note=" ".join(f"not modelled: {error}".split()))
    scenario = prediction.scenario
    time = prediction.time
    memory = prediction.memory
    if Row(cells).has_flags:  # Megatron-LM logs the bytes of the last rank
        memory = memory_of_rank(scenario, scenario.sizes["pp"] - 1)
        assumed.append("memory of the last pipeline rank")
    notes = [f"engine {scenario.engine.name}", *dict.fromkeys(assumed)]
    return RowPrediction(
        cells["id"],
        fits="yes" if prediction.headroom >= 0 else "no",
        memory_gib=f"{memory.total / 2**30:.3f}",
        step_time_s=f"{time.total:.6g}",
        tokens_per_s_per_gpu=f"{time.tokens_per_s_per_gpu:.6g}",
        mfu=f"{time.mfu:.4f}",
        note="; ".join(notes),
    )


def _best_candidate(cells: dict[str, str], *, engine: str | None) -> RowCandidate:
    """The choice for open cells with the best predicted time.

    Published runs are tuned, so an open micro-batch size or number of virtual stages is chosen as a
    user would, and recomputation only where nothing fits without.
    """
    candidates: list[RowCandidate] = []
    problem: NanotrainError = ConfigError("no micro-batch size divides the batch")
    for choices in _choices(Row(cells)):
        row = Row(cells | choices)
        try:
            scenario = scenario_of_row(row, engine=engine)
            batch_size = row.number("gbs")
            was_rounded = batch_size not in (None, scenario.config.train.global_batch_size)
            if "mbs" in choices and was_rounded:
                continue  # a micro-batch size that does not divide it
            prediction = predict(scenario)
        except NanotrainError as error:
            problem = error
            continue
        notes = [f"{name} not stated: {value}" for name, value in choices.items()]
        candidates.append(RowCandidate(prediction, [*notes, *row.assumed]))
    if not candidates:
        raise problem
    return max(candidates, key=lambda candidate: candidate.rank)


def _choices(row: Row) -> Iterator[dict[str, str]]:
    """All combinations of choices for the cells that a row leaves open."""
    names = [name for name in CHOICES if row.leaves_open(name)]
    for values in product(*(CHOICES[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def run_rows(table: Path, output: Path, *, engine: str | None = None) -> str:
    """Predict a table, write the predictions as TSV and return how many rows were modelled.

    Raises:
        ConfigError: a file that cannot be read or written, or an unknown engine.
    """
    if engine is not None:
        engine_of(engine)
    predictions = [predict_row(cells, engine=engine) for cells in read_table(table)]
    lines = ["\t".join(line) + "\n" for line in (COLUMNS, *predictions)]
    try:
        output.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {output}", why=error.strerror or "", fix="choose another --output"
        ) from None
    num_modelled = sum(1 for row in predictions if row.memory_gib)
    return f"{num_modelled} of {len(predictions)} rows predicted, written to {output}"
