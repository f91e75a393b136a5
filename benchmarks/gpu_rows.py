"""Rows of a check on a GPU: printed one by one, each with a summary, and kept in a file.

A machine with a GPU may be taken away at any moment. So every row is printed as soon as it is
known, a line after it says where the check stands, and `OUT/NAME.md` holds all rows so far.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

OK, WRONG, FAILED, LEFT_OUT = "ok", "WRONG", "FAILED", "left out"
BAD = (WRONG, FAILED)
NAMED_ROWS = 4  # rows that a summary names


@dataclass(frozen=True)
class Row:
    """One line of a check.

    Attributes:
        name: what ran.
        state: `OK`; `WRONG` where values differ from the reference; `FAILED` where it raised or
            did not end; `LEFT_OUT` where the machine lacks something or the time was up.
        figures: what was measured, in words; for other states the reason.
    """

    name: str
    state: str
    figures: str = ""

    def __str__(self) -> str:
        return f"{self.name:62} {self.state:8} {self.figures}".rstrip()


class RowReport:
    """The rows of one check.

    Args:
        name: name of the check, and of its file.
        folder: where the file is written; None: nowhere.
        machine: one line about the machine.
    """

    def __init__(self, name: str, *, folder: Path | None, machine: str) -> None:
        self.name = name
        self.machine = machine
        self.rows: list[Row] = []
        self._path = None if folder is None else folder / f"{name}.md"

    def add(self, row: Row) -> None:
        """Print a row and the summary, and write the file."""
        self.rows.append(row)
        print(row, flush=True)
        print(f"    {self.summary()}", flush=True)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(self.table())

    def summary(self) -> str:
        """One line: how many rows are in which state, and the names of the bad ones."""
        counts = Counter(row.state for row in self.rows)
        parts = [f"{number} {state}" for state, number in counts.items()]
        line = f"{self.name}: {', '.join(parts)}"
        bad = [row.name for row in self.rows if row.state in BAD]
        if not bad:
            return line
        more = f" and {len(bad) - NAMED_ROWS} more" if len(bad) > NAMED_ROWS else ""
        return f"{line}: {'; '.join(bad[:NAMED_ROWS])}{more}"

    def table(self) -> str:
        """All rows as Markdown."""
        lines = [f"# {self.name}", "", self.machine, "", "| row | state | |", "|---|---|---|"]
        for row in self.rows:
            figures = row.figures.replace("|", "\\|")
            lines.append(f"| {row.name} | {row.state} | {figures} |")
        return "\n".join([*lines, "", self.summary(), ""])

    @property
    def exit_code(self) -> int:
        """1 where a row is wrong or failed."""
        return int(any(row.state in BAD for row in self.rows))
