"""Loggers that say which rank speaks.

`get_logger` is what every module uses. `set_coordinates` is called once per process, when the rank knows its
place, and prefixes every line with it ("pp1 dp3 tp0"). `first` loggers speak on one rank of the job only.
"""

import logging
import sys
from typing import TextIO


class _Coordinates(logging.Filter):
    """Adds the rank's coordinates to every record; `quiet` ranks pass warnings and errors only."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.quiet = False

    def filter(self, record: logging.LogRecord) -> bool:
        record.coordinates = f"[{self.text}] " if self.text else ""
        return not self.quiet or record.levelno >= logging.WARNING


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
