"""`nanotrain family add`: a row derived from a folder, compared with transformers, and written.

    add_family    derive, check and write
    AddedFamily   the row, the file that has it, and what was checked

The row is written only if nothing is missing, if the tensors of the folder are those of the row,
and, where transformers has the class, if both compute the same.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanotrain.errors import EnvironmentFault, HuggingFaceError
from nanotrain.interop.hf.config_class import has_class
from nanotrain.interop.hf.derive.findings import Findings, Row
from nanotrain.interop.hf.derive.folder import (
    candidates,
    derive_family,
    has_weights,
    nearest_family,
)
from nanotrain.interop.hf.families import (
    FAMILIES,
    FOLDER_ROWS,
    build_family,
    known_rows,
    model_from_hf,
)
from nanotrain.interop.hf.folder_row import (
    ROW_FILE,
    read_folder_row,
    require_readable,
    write_row,
)
from nanotrain.interop.hf.import_weights import WeightReader
from nanotrain.interop.hf.tables import MODELS, TABLES
from nanotrain.parity.conversion import TOLERANCE, ConversionReport, check_conversion
from nanotrain.quantities import count_of

MAX_MISSING = 20  # kinds that a message names


@dataclass(frozen=True)
class AddedFamily:
    """A row that was derived from a folder.

    Attributes:
        kind: its `model_type`.
        row: the row.
        nearest: the known family with most in common, and how much.
        source: where the modeling code was read; None without any.
        notes: what was concluded.
        report: the comparison with transformers; None where it has no class of the model.
        files: the files that were written.
    """

    kind: str
    row: Row
    nearest: str
    source: Path | None
    notes: tuple[str, ...]
    report: ConversionReport | None
    files: tuple[Path, ...]

    @property
    def check(self) -> str:
        """Text on the comparison with transformers."""
        if self.report is not None:
            return self.report.text
        return (
            "not compared: transformers has no class of this model_type, and code of the folder "
            "is not run; tensors of the files have the names and shapes of the row"
        )

    def text(self) -> str:
        """The row and the results of the checks."""
        source = "none, so norms are assumed before attention and MLP, and halves are rotated"
        if self.source is not None:
            source = f"{self.source}, read as text"
        lines = [
            write_row(self.kind, self.row).rstrip(),
            "",
            f"nearest  {self.nearest}",
            f"code     {source}",
            *(f"note     {note}" for note in self.notes),
            f"checked  {self.check}",
            *(f"written  {file}" for file in self.files),
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The row and the checks as values of a JSON file."""
        report = None if self.report is None else self.report.to_dict()
        values: dict[str, Any] = {
            "model_type": self.kind,
            "row": self.row,
            "nearest": self.nearest,
            "source": None if self.source is None else str(self.source),
            "notes": self.notes,
            "check": report,
            "files": [str(file) for file in self.files],
        }
        return json.dumps(values, indent=2)


def add_family(folder: Path, *, output: Path | None, in_tree: bool) -> AddedFamily:
    """Derive the row of a folder's family, check it, and write it.

    Args:
        folder: the folder with config.json and weights, and with modeling code as it was published.
        output: the file to write; None for nanotrain_family.yaml in the folder, which is read with
            it from then on.
        in_tree: write it into the tables of this copy of nanotrain.

    Raises:
        HuggingFaceError: a family that needs more than names, and what it needs; or one that
            computes something else than transformers.
        EnvironmentFault: a file cannot be written.
    """
    if (folder / ROW_FILE).is_symlink():
        raise HuggingFaceError(
            f"{folder / ROW_FILE} is a symbolic link",
            why="a file outside of the folder would be replaced",
            fix="remove it, or write the row elsewhere: --output FILE",
        )
    f = derive_family(folder)
    _refuse_missing(f)
    nearest, common, total = nearest_family(f)
    row, report = _choose(f, folder)
    added = AddedFamily(
        f.kind,
        row,
        f"{nearest}: {common} of {total} names and settings are alike",
        source=None if f.source is None else f.source.path,
        notes=tuple(f.notes),
        report=report,
        files=(),
    )
    files = _write(added, folder, output=output, in_tree=in_tree)
    return replace(added, files=files)


def _refuse_missing(f: Findings) -> None:
    """Raise one error that names all that is missing."""
    if not f.missing:
        return
    named = [str(missing) for missing in f.missing[:MAX_MISSING]]
    if len(f.missing) > MAX_MISSING:
        named.append(f"and {len(f.missing) - MAX_MISSING} more")
    raise HuggingFaceError(
        f"no row for {f.kind}: nanotrain lacks {count_of(len(f.missing), 'thing')}",
        why="\n  " + "\n  ".join(named),
        fix="\nadd what is missing (docs/new_family.md says where), or write the row by hand",
    )


def _choose(f: Findings, folder: Path) -> tuple[Row, ConversionReport | None]:
    """The first row that computes what transformers does, or the only one without its class."""
    rows = candidates(f)
    for row in rows:
        require_readable(f.kind, row, known=known_rows())
    if not has_class(f.kind):
        if len(rows) > 1:
            f.lack("an order of rows", asked_by=f"{len(rows)} orders fit the shapes of tensors")
        for entry in f.unproven:
            f.lack("the meaning of an entry", asked_by=f.place_of(entry))
        _refuse_missing(f)
        with _registered(f.kind, rows[0], folder=folder):
            WeightReader(folder, model_from_hf(folder))
        return rows[0], None
    reports = []
    for row in rows:
        with _registered(f.kind, row, folder=folder):
            model_config = model_from_hf(folder)
            if has_weights(folder):
                WeightReader(folder, model_config)
            pinned = f.entries.keys() & row.get("required", {}).keys()
            kept = {entry: f.entries[entry] for entry in pinned}
            report = check_conversion(model_config, f.kind, kept=kept)
        if report.holds:
            return row, report
        reports.append(report)
    best = min(reports, key=lambda report: report.logits)
    unproven = ", ".join(f.unproven) or "none"
    raise HuggingFaceError(
        f"no row for {f.kind}: the likeliest one computes something else than transformers",
        why=f"{best.text}; {TOLERANCE:g} counts as equal. Entries whose meaning is not known: "
        f"{unproven}",
        fix="the class computes something that neither entries, tensors nor known patterns of its "
        "code show: compare its code with docs/new_family.md and write the row by hand",
    )


@contextmanager
def _registered(kind: str, row: Row, *, folder: Path) -> Iterator[None]:
    """Register the family of a row among the known families, in the block."""
    earlier = read_folder_row(folder, known=known_rows())
    FAMILIES[kind] = build_family(kind, row)
    # a file of an earlier command is not read now
    FOLDER_ROWS[kind] = "" if earlier is None else earlier.text
    try:
        yield
    finally:
        del FAMILIES[kind]
        FOLDER_ROWS.pop(kind, None)


def _write(
    added: AddedFamily, folder: Path, *, output: Path | None, in_tree: bool
) -> tuple[Path, ...]:
    """Write the row; returns the files."""
    try:
        if in_tree:
            return _write_in_tree(added)
        comments = ("Written by `nanotrain family add`.", added.check)
        path = output or folder / ROW_FILE
        path.write_text(write_row(added.kind, added.row, comments=comments))
        return (path,)
    except OSError as error:
        raise EnvironmentFault(
            "cannot write the row",
            why=f"{error.filename}: {error.strerror}",
            fix="--output FILE writes it elsewhere",
        ) from None


def _write_in_tree(added: AddedFamily) -> tuple[Path, ...]:
    """Add the row and its line for docs/families.md to the tables of the package."""
    lines = write_row(added.kind, added.row).splitlines()[1:]
    rows = TABLES.read_text()
    models = MODELS.read_text()
    title = added.row["architecture"].removesuffix("ForCausalLM")
    nearest = added.nearest.partition(":")[0]
    named = f'  {added.kind}: [{title}, "derived; nearest to {nearest}"]\n'
    TABLES.write_text("\n".join([rows.rstrip("\n"), "", *lines, ""]))
    MODELS.write_text(models.replace("\nunsupported:\n", f"{named}\nunsupported:\n", 1))
    return (TABLES, MODELS)
