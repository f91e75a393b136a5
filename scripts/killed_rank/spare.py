"""A process that waits to become a rank of `scripts/restart_kills`."""

import sys
from pathlib import Path

from nanotrain.train import spare
from scripts.killed_rank import SPARE, Plan, train


class StandardInput:
    """Standard input; notes that this process has done its imports, and reads from it."""

    def __init__(self, file: object) -> None:
        self._file = file

    def readline(self) -> str:
        """The next line."""
        (Path(Plan.read().folder) / SPARE).touch()
        line: str = self._file.readline()  # type: ignore[attr-defined]
        return line


if __name__ == "__main__":
    sys.stdin = StandardInput(sys.stdin)  # type: ignore[assignment]
    spare.main = lambda: train()  # type: ignore[assignment]
    spare.stand_by()
