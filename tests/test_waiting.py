"""Waits are named in the log, and end in time."""

import logging
import threading
import time

import pytest

from nanotrain import waiting
from nanotrain.waiting import Wait, named_wait


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "NAMED_AFTER_S", 0.1)


def test_a_result_and_an_error_arrive_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    wait = Wait("x does not answer", 5.0)
    assert wait.call(lambda: 7) == 7
    with pytest.raises(KeyError, match="planted"):
        wait.call(lambda: {}["planted"])
    assert not caplog.records


def test_silence_is_named_once_and_given_up(caplog: pytest.LogCaptureFixture) -> None:
    wait, forever = Wait("x does not answer", 0.3), threading.Event()
    start = time.monotonic()
    with (
        caplog.at_level(logging.WARNING, "nanotrain"),
        pytest.raises(TimeoutError, match="no answer for 0.3 s"),
    ):
        wait.call(forever.wait)
    forever.set()
    assert 0.3 <= time.monotonic() - start < 2
    assert [record.getMessage() for record in caplog.records] == [
        "x does not answer for 0 s; this ends after 0.3 s"
    ]


def test_what_moves_is_not_given_up_and_one_call_has_a_limit_of_its_own() -> None:
    wait = Wait("x", 0.3)

    def slow() -> str:
        for _ in range(6):
            time.sleep(0.1)
            wait.move()
        return "done"

    assert wait.call(slow) == "done"
    with pytest.raises(TimeoutError):
        wait.call(lambda: time.sleep(0.25), limit_s=0.05)
    assert not wait.is_over
    time.sleep(0.3)
    assert wait.is_over


def test_a_long_block_is_named_and_a_short_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nanotrain"):
        with named_wait("short"):
            pass
        with named_wait("the lock of x is held"):
            time.sleep(0.2)
    assert [record.getMessage() for record in caplog.records] == [
        "the lock of x is held, for 0.1 s"
    ]
