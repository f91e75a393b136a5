"""What is logged, for tests that care."""

import logging
from collections.abc import Iterator

import pytest


class _Notes(logging.Handler):
    def __init__(self, into: list[str]) -> None:
        super().__init__()
        self.into = into

    def emit(self, record: logging.LogRecord) -> None:
        self.into.append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The messages that nanotrain logs during the test."""
    messages: list[str] = []
    root, handler = logging.getLogger("nanotrain"), _Notes(messages)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield messages
    root.removeHandler(handler)
    root.setLevel(level)
