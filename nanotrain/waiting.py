"""Waits for another machine or process: named in the log after ten seconds, ended in time.

Wait         a wait with a name and a time; it calls functions on a thread of their own
named_wait   name in the log what a block waits for, if it takes long
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

from nanotrain.log import get_logger

NAMED_AFTER_S = 10.0  # a wait of less is not named
_MARGIN_S = 0.01
Result = TypeVar("Result")
log = get_logger(__name__)


class Wait:
    """A wait for another machine.

    Args:
        what: the wait for the log, as "store:29500 does not answer"; it may change.
        timeout_s: seconds of silence after which the wait ends.
    """

    def __init__(self, what: str, timeout_s: float) -> None:
        self.what = what
        self.timeout_s = timeout_s
        self._moved_at = time.monotonic()
        self._is_named = False

    def move(self) -> None:
        """Record progress, which restarts the silence that `is_over` measures; from any thread."""
        self._moved_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last progress (`move`), or since the start."""
        return time.monotonic() - self._moved_at

    @property
    def is_over(self) -> bool:
        """Whether there was no progress for `timeout_s`."""
        return self.silent_s >= self.timeout_s

    def pause(self, seconds: float) -> None:
        """Sleep before another attempt, and name the wait if it is long."""
        self._name()
        time.sleep(seconds)

    def call(self, function: Callable[[], Result], *, limit_s: float = float("inf")) -> Result:
        """Call a function on a thread of its own, and give it up after silence.

        A call into C++ or a library that waits without end cannot be interrupted: its thread is
        left, and goes on until the process ends.

        Args:
            function: what may wait for another machine; while it does something it calls `move`.
            limit_s: seconds of silence of this call alone.

        Raises:
            TimeoutError: it was given up.
        """
        future: Future[Result] = Future()
        start = time.monotonic()
        threading.Thread(target=_fulfil, args=(future, function), daemon=True).start()
        while True:
            silent_call_s = min(self.silent_s, time.monotonic() - start)
            left_s = min(self.timeout_s - self.silent_s, limit_s - silent_call_s)
            if left_s <= 0 and not future.done():
                raise TimeoutError(f"no answer for {min(self.timeout_s, limit_s):g} s")
            if not self._is_named:
                left_s = min(left_s, max(NAMED_AFTER_S - self.silent_s, 0.0) + _MARGIN_S)
            wait([future], timeout=left_s)
            if future.done():
                return future.result()
            self._name()

    def _name(self) -> None:
        """Name the wait in the log, once, after some silence."""
        if self._is_named or self.silent_s < NAMED_AFTER_S:
            return
        self._is_named = True
        # an error: before the ranks have met, the others than the first log nothing less
        log.error("%s for %.0f s; this ends after %g s", self.what, self.silent_s, self.timeout_s)


def _fulfil(future: Future[Result], function: Callable[[], Result]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # raised again by the thread that waits
        future.set_exception(error)


@contextmanager
def named_wait(what: str) -> Iterator[None]:
    """Log once that a block is waiting, if it takes more than NAMED_AFTER_S.

    Args:
        what: the wait, as "the lock of runs/a is held by another process".
    """
    timer = threading.Timer(NAMED_AFTER_S, log.error, (f"%s, for {NAMED_AFTER_S:g} s", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
