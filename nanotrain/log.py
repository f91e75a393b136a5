"""Loggers that say which rank speaks.

`get_logger` is what every module uses. `start_logging` is called when a process knows whether it is the first rank of
the job, and again when it knows its place. What the first rank says is news of the whole job; a warning may be of one
rank alone, so it begins with that rank's place ("pp1 dp3 tp0").
"""

import logging
import sys
from typing import TextIO


class _Coordinates(logging.Filter):
    """Adds the rank's coordinates to warnings and errors; `quiet` ranks pass nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.quiet = False

    def filter(self, record: logging.LogRecord) -> bool:
        is_warning = record.levelno >= logging.WARNING
        record.coordinates = f"[{self.text}] " if self.text and is_warning else ""
        return is_warning or not self.quiet


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the time: a progress bar puts itself in its place to keep lines apart."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Where lines go now."""
        return sys.stderr


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, a child of `nanotrain`."""
    return logging.getLogger(name)


def start_logging(*, coordinates: str = "", is_first: bool = True, level: int = logging.INFO) -> None:
    """Send nanotrain's log lines to standard error; calling it again replaces the coordinates.

    Args:
        coordinates: the rank's place, "dp3" or "pp1 dp3 tp0"; empty for a job of one rank.
        is_first: whether this rank is the one that speaks for the job; the others say warnings and errors only.
        level: the lowest level shown.
    """
    root = logging.getLogger("nanotrain")
    place = _Coordinates()
    place.text, place.quiet = coordinates, not is_first
    handler = _StandardError()
    handler.addFilter(place)
    handler.setFormatter(logging.Formatter("%(coordinates)s%(message)s"))
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
