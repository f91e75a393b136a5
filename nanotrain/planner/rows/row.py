"""A row of a table of measurements: its cells as text, numbers and words."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError

read_data = cache(partial(read_table, folder=Path(__file__).parent))

UNSTATED = {"", "-", "?", "n/a", "na", "null", "unknown", "not stated"}
WORDY_COLUMNS = ("zero", "precision", "overlap_flags", "flags")
# bounds of numbers of a published run: tokens per batch have 8 digits
MAX_NUMBER = 10**9
MAX_LAYERS = 10**4
ABOVE_ONE = r"[2-9]|\d\d"  # the pattern of a number above 1


@dataclass
class Row:
    """A row of a table of published runs: its cells by column, and assumptions made for it."""

    cells: Mapping[str, str]
    assumed: list[str] = field(default_factory=list)

    def text(self, column: str) -> str:
        """A cell in lower case; empty where nothing is stated."""
        text = (self.cells.get(column) or "").strip().lower()
        return "" if text in UNSTATED else text

    def number(self, column: str) -> int | None:
        """A whole number; None where the row has none.

        Raises:
            ConfigError: something else than a number.
        """
        text = self.text(column).replace(",", "").replace("_", "")
        if text in ("", "none"):
            return None
        if not re.fullmatch(r"\d{1,12}(\.0*)?", text) or not float(text):
            raise ConfigError(f"{column} is {text!r}", why="it takes a whole number of at least 1")
        number = int(float(text))
        most = MAX_LAYERS if column == "layers" else MAX_NUMBER
        if number > most:
            raise ConfigError(f"{column} is {number:,}", why=f"numbers are at most {most:,}")
        return number

    def required(self, column: str) -> int:
        """A number that the row must state; ConfigError if it does not."""
        value = self.number(column)
        if value is None:
            raise ConfigError(f"{column} is not stated")
        return value

    def assume(self, value: Any, text: str) -> Any:
        """The value, with a note of the assumption."""
        self.assumed.append(text)
        return value

    def words(self, *columns: str) -> str:
        """The text of columns, by default of option columns, without hyphens and underscores."""
        text = " ".join(self.text(column) for column in columns or WORDY_COLUMNS)
        return re.sub("[-_]", " ", text)

    def has(self, column: str, pattern: str) -> bool:
        """Whether a pattern is found in a column."""
        return re.search(pattern, self.words(column)) is not None

    def number_after(self, column: str, pattern: str) -> int | None:
        """The number in the parentheses of a pattern; None if it is not found in a column."""
        match = re.search(pattern, self.words(column))
        return int(match[1]) if match else None

    def choice(self, key: str, *columns: str) -> str:
        """The first choice of a key of `words.yaml` in columns; empty without one."""
        words = self.words(*columns)
        for choice, pattern in read_data("words")[key].items():
            if re.search(pattern, words):
                name: str = choice.partition(" ")[0]
                return name
        return ""

    def leaves_open(self, column: str) -> bool:
        """Whether a user would have chosen a value that a column does not state."""
        if self.has_flags or self.text(column):
            return False
        if column != "vp":
            return True
        return "interleaved" in self.text("overlap_flags") and (self.number("pp") or 1) > 1

    @property
    def has_flags(self) -> bool:
        """Whether the row has the flags of a run of Megatron-LM."""
        return bool(self.text("flags"))
