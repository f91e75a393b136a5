"""Logging in tests: what is logged, and the logger as it was."""

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


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """`main` sets logging up for a process of its own; this takes it back."""
    root = logging.getLogger("nanotrain")
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.level, root.propagate = before
