"""Loggers with the coordinates of the rank in warnings, and `progress` of what takes long.

Modules use `get_logger`. Entry points call `start_logging` once the rank is known, and again once
its coordinates are. The first rank logs for the whole job. A warning may concern one rank only, so
it begins with that rank's coordinates ("pp1 dp3 tp0").
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TextIO

SHOWN_AFTER_S = 2.0  # what takes less is not shown as running


class _Formatter(logging.Formatter):
    """Begins warnings and errors with the rank's coordinates."""

    def __init__(self, coordinates: str) -> None:
        super().__init__()
        self._prefix = f"[{coordinates}] " if coordinates else ""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return self._prefix + text if record.levelno >= logging.WARNING else text


class _StandardError(logging.StreamHandler[TextIO]):
    """Handler for the current `sys.stderr`, which a progress bar replaces to stay last."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The current stream."""
        return sys.stderr


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, a child of `nanotrain`."""
    return logging.getLogger(name)


@cache
def log_once(text: str) -> None:
    """Log a line the first time that a process has it, such as a fact about a file."""
    get_logger("nanotrain").info(text)


def start_logging(
    *, coordinates: str = "", is_first: bool = True, level: int = logging.INFO
) -> None:
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


@contextmanager
def progress(
    what: str, *, total: float | None = None, is_shown: bool = True
) -> Iterator[Callable[[float], None]]:
    """Show on standard error that the block still runs.

    On a terminal this is a bar, elsewhere a line now and one at the end.

    A block of less than SHOWN_AFTER_S shows nothing.

    Args:
        what: description of the block, as "tokenizing".
        total: amount to be done; None if it is unknown.
        is_shown: False on other ranks than the first.

    Yields:
        A function that adds to the amount that is done.
    """
    from rich.console import Console  # only what takes long needs them
    from rich.progress import Progress, TimeElapsedColumn

    if not is_shown:
        yield lambda amount: None
        return
    columns, console = (*Progress.get_default_columns(), TimeElapsedColumn()), Console(stderr=True)
    bar = Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=not console.is_terminal,
    )
    task, start = bar.add_task(what, total=total), time.monotonic()

    def show() -> None:
        print(f"{what} ...", file=sys.stderr, flush=True)
        bar.start()

    timer = threading.Timer(SHOWN_AFTER_S, show)
    timer.start()
    try:
        yield lambda amount: bar.advance(task, amount)
    finally:
        timer.cancel()
        timer.join()  # it may be showing the bar
        if bar.live.is_started:  # else rich would print an empty line
            bar.stop()
    if (seconds := time.monotonic() - start) >= SHOWN_AFTER_S:
        print(f"{what}: done after {seconds:.1f} s", file=sys.stderr, flush=True)
