"""`Turns`: two computations of a rank take turns, so that one hides the transfers of the other.

    B   sends gradients to experts |               | experts', sends back |          | attention' .
    F                              | attention, sends tokens              | experts .. |

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
    """Turns of two computations of a rank; shared by its groups."""

    def __init__(self) -> None:
        # gates of the calling thread and of the other thread
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
        first, second = computations
        self._turn = 1
        self._is_shared = True
        self._failure = None
        modes = _get_current_dispatch_mode_stack()
        enter_stream = same_stream()

        def run_second() -> None:
            """Run the second computation with the contexts of the calling thread."""
            with ExitStack() as stack:  # contexts that belong to a thread
                stack.enter_context(enter_stream())
                for mode in modes:
                    stack.enter_context(mode)
                self._run(second, index=1)

        other = self._thread.submit(run_second)
        self._gates[0].acquire()
        self._run(first, index=0)
        other.result()
        if self._failure is not None:
            raise self._failure

    def hand_over(self) -> None:
        """Let the other computation, if there is one, run until it hands over or ends."""
        if not self._is_shared:
            return
        index = self._turn
        self._turn = 1 - index
        self._gates[self._turn].release()
        self._gates[index].acquire()
        if self._failure is not None:
            raise self._failure

    def _run(self, computation: Callable[[], None], *, index: int) -> None:
        """Run one of the two computations; at its end the other runs without turns."""
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
