"""The thread of a save: its result and its error are the caller's, and it ends when it is cancelled."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nanotrain.checkpoint.background import BackgroundSave


def test_the_result_and_the_error_of_the_thread_are_the_caller_s() -> None:
    assert BackgroundSave(lambda is_cancelled: Path("step")).result() == Path("step")

    def fail(is_cancelled: Callable[[], bool]) -> None:
        raise OSError("full")

    save = BackgroundSave(fail)
    with pytest.raises(OSError, match="full"):
        save.result()
    assert not save.give_up(0.0) and not save.is_running


def test_a_cancelled_save_has_ended_when_cancel_returns() -> None:
    begun, seen = threading.Event(), threading.Event()

    def wait_for_ever(is_cancelled: Callable[[], bool]) -> None:
        begun.set()
        while not is_cancelled():
            seen.wait(0.001)
        seen.set()

    save = BackgroundSave(wait_for_ever)
    begun.wait()
    assert save.is_running
    save.cancel()
    assert seen.is_set() and not save.is_running


def test_giving_up_waits_no_longer_than_its_timeout_and_cancels() -> None:
    may_end = threading.Event()

    def until_cancelled(is_cancelled: Callable[[], bool]) -> None:
        may_end.wait(60)
        assert is_cancelled(), "a save that was given up must not commit"

    save = BackgroundSave(until_cancelled)
    assert not save.give_up(0.0) and save.is_running
    may_end.set()
    assert save.result() is None
    assert save.give_up(0.0)
