"""`Turns`: two computations of a rank that take turns where one waits for a transfer, so that the
other hides it.

    B   sends gradients to experts |                | experts', sends back  |          | attention' ..
    F                              | attention, sends tokens                | experts .. |

One host thread runs at a time and hands over at the same places on every rank: all ranks start
their collectives in one order, and results do not depend on timing. On a GPU both queue their
operators on one stream.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from threading import Semaphore

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nanotrain.comm.device import same_stream


class Turns:
    """Whose turn it is; shared by the groups of a rank."""

    def __init__(self) -> None:
        # of the thread of the caller, and of the other one
        self._gates = Semaphore(0), Semaphore(0)
        self._turn, self._is_shared = 0, False
        self._failure: BaseException | None = None

    def run(self, computations: Sequence[Callable[[], None]]) -> None:
        """Run a computation, or two in turns, of which the second begins, in another thread.

        Raises:
            BaseException: the first failure of either; the other one stops with it where it gets
                its next turn.
        """
        if len(computations) < 2:
            for computation in computations:
                computation()
            return
        first, beside = computations
        self._turn, self._is_shared, self._failure = 1, True, None
        modes, enter_stream = _get_current_dispatch_mode_stack(), same_stream()

        def run_beside() -> None:
            with ExitStack() as stack:  # what belongs to a thread
                stack.enter_context(enter_stream())
                for mode in modes:
                    stack.enter_context(mode)
                self._run(beside, index=1)

        other = self._thread.submit(run_beside)
        self._gates[0].acquire()
        self._run(first, index=0)
        other.result()
        if self._failure is not None:
            raise self._failure

    def hand_over(self) -> None:
        """Let the other computation run until it hands over or ends; without another one return at
        once.
        """
        if not self._is_shared:
            return
        own = self._turn
        self._turn = 1 - own
        self._gates[self._turn].release()
        self._gates[own].acquire()
        if self._failure is not None:
            raise self._failure

    def _run(self, computation: Callable[[], None], *, index: int) -> None:
        """Run one of two, then leave all turns to the other one."""
        try:
            if self._failure is None:
                computation()
        except BaseException as failure:  # raised by `run`, in the thread of the caller
            self._failure = self._failure or failure
        if self._is_shared:
            self._is_shared, self._turn = False, 1 - index
            self._gates[self._turn].release()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="turns")
