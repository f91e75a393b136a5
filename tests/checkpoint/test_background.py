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
