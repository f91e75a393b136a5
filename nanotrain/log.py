"""Loggers with the coordinates of the rank in warnings.

Modules use `get_logger`. Entry points call `start_logging` once the rank is known, and again once its coordinates are.
The first rank logs for the whole job. A warning may concern one rank only, so it begins with that rank's coordinates
("pp1 dp3 tp0").
"""

import logging
import sys
from typing import TextIO


class _Formatter(logging.Formatter):
    """Begins warnings and errors with the rank's coordinates."""

    def __init__(self, coordinates: str) -> None:
        super().__init__()
        self._prefix = f"[{coordinates}] " if coordinates else ""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return self._prefix + text if record.levelno >= logging.WARNING else text


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a progress bar replaces to keep its own line last."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The current stream."""
        return sys.stderr


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, a child of `nanotrain`."""
    return logging.getLogger(name)


def start_logging(*, coordinates: str = "", is_first: bool = True, level: int = logging.INFO) -> None:
    """Send nanotrain's log lines to standard error; calling it again replaces the coordinates.

    Args:
        coordinates: coordinates of the rank, "dp3" or "pp1 dp3 tp0"; empty for a job of one rank.
        is_first: whether this is the first rank; other ranks log only warnings and errors.
        level: lowest level to log.
    """
    root = logging.getLogger("nanotrain")
    handler = _StandardError()
    handler.setLevel(level if is_first else max(level, logging.WARNING))
    handler.setFormatter(_Formatter(coordinates))
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
