"""Progress of `nanotrain prepare`: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from typing import Any

from nanotrain.prepare.parts import PartDone
from nanotrain.quantities import count_of

_SECONDS_BETWEEN_LINES = 5.0


class PrepareProgress:
    """Counts and displays finished parts; a context manager.

    The input has `total_bytes` (0 if unknown), of which an earlier run finished `done_bytes`.
    """

    def __init__(self, total_bytes: int, *, done_bytes: int = 0) -> None:
        self.total_bytes, self.done_bytes = total_bytes, done_bytes
        self.documents = self.tokens = self.text_bytes = 0
        self._started = self._printed = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> "PrepareProgress":
        if sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = TextColumn("tokenizing"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rates]}")
            self._bar = Progress(*columns, TimeRemainingColumn())
            self._bar.start()
            total = self.total_bytes or None
            self._task = self._bar.add_task("", total=total, completed=self.done_bytes, rates="")
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, part: PartDone) -> None:
        """Count a finished part and update the display."""
        self.done_bytes += part.num_bytes
        self.documents += part.documents
        self.tokens += part.tokens
        self.text_bytes += part.text_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done_bytes, rates=self.rates())
        elif time.monotonic() - self._printed > _SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            percent = f"{100 * self.done_bytes / self.total_bytes:.0f} %  " if self.total_bytes else ""
            print(f"{percent}{count_of(self.documents, 'document')}  {self.rates()}", flush=True)

    def rates(self) -> str:
        """Rates of this run: text in MB/s and tokens per second."""
        elapsed = max(1e-9, time.monotonic() - self._started)
        return f"{self.text_bytes / elapsed / 1e6:.1f} MB/s  {self.tokens / elapsed:,.0f} tok/s"
