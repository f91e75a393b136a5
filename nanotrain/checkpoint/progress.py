"""A progress bar on standard error, on a terminal only."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")


def progress(items: Iterable[Item], label: str) -> Iterator[Item]:
    """Yield the items and show how many are done."""
    total = len(items) if isinstance(items, Sized) else None
    shown = sys.stderr.isatty()
    yield from track(items, label, total=total, console=Console(stderr=True), transient=True, disable=not shown)
