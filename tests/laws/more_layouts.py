"""Rows of a law that the suite leaves out, and `make layouts` runs.

A row that a bug of tests/mutants names stays in the suite, so that the bug is still seen there.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def with_mark(rows: Iterable[Any]) -> list[Any]:
    """The rows as parameters with the mark `more_layouts`."""
    return [pytest.param(row, marks=pytest.mark.more_layouts) for row in rows]
