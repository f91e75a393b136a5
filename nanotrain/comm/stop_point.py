"""`StopPoint`: the microbatch before which all ranks stop after one has received a signal.

A pass is one run of a pipeline schedule: a training step or a validation batch. All ranks run the
same passes, and positions (pass, microbatch) are ordered. A rank that has to stop sets a key in the
store of the job.

    A thread per rank runs once per poll_s, as long as the current pass takes longer than that:
    request    read the key; short steps never do, as the vote before the next step comes as early
    hold       this rank begins no further microbatch, and publishes how many it has begun
    decide     the last rank to publish takes the largest of these numbers and publishes it
    finish     every rank completes the microbatches before that point and begins none after it

So no collective of a microbatch is entered by some ranks only, and no rank waits inside a
collective for a rank that holds, because threads publish independently of what their ranks compute.
Without a request nothing is sent, and the host does not wait for the device.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from nanotrain.comm.collectives import broadcast_object
from nanotrain.comm.group import Group
from nanotrain.comm.work import CommunicationFault

POLL_S = 1.0
MIN_POLL_S = 0.05  # while the ranks agree
RANKS_PER_POLL_S = 10_000  # polls of larger worlds are less frequent: one process serves the store


class Position(NamedTuple):
    """How far a rank is; a later position compares as greater."""

    pass_number: int
    num_begun: int  # microbatches of the pass that have begun


class PassStopped(Exception):
    """All ranks stopped before a microbatch of a pass, whose gradients and loss are incomplete."""

    def __init__(self, num_microbatches: int) -> None:
        super().__init__(f"stopped after {num_microbatches} microbatches")
        self.num_microbatches = num_microbatches  # complete ones


class StopPoint:
    """This rank's part of the agreement.

    Args:
        store: store of all ranks.
        control: group of all ranks, for the names of the keys.
        timeout_s: seconds that this rank waits for the others to reply.
    """

    def __init__(self, store: Store, control: Group, *, timeout_s: float) -> None:
        self._store = store
        self._control = control
        self._timeout_s = timeout_s
        self.poll_s = max(POLL_S, control.size / RANKS_PER_POLL_S)
        self._changed = threading.Condition()
        self._begun = Position(0, 0)
        self._pass_start = time.monotonic()
        self._holds = False
        self._decision: Position | None = None
        self._wants_stop: Callable[[], bool] = lambda: False
        self._prefix = ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, wants_stop: Callable[[], bool]) -> None:
        """Start the thread; all ranks call this.

        `wants_stop` returns whether this rank has to stop.
        """
        self._wants_stop = wants_stop
        # A store may outlive a run: a second run of the same processes uses other keys.
        self._prefix = f"stop-{broadcast_object(time.time_ns(), self._control)}/"
        self._thread = threading.Thread(target=self._watch, name="stop-point", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def begin_pass(self) -> None:
        """Record that a pass begins; called on all ranks."""
        with self._changed:
            self._begun = Position(self._begun.pass_number + 1, 0)
            self._pass_start = time.monotonic()

    def may_begin(self, microbatch: int) -> bool:
        """Whether work on a microbatch of this pass may begin; False if all ranks stop first.

        Raises:
            CommunicationFault: another rank did not reply in time.
        """
        wanted = Position(self._begun.pass_number, microbatch + 1)
        if wanted <= self._begun:
            return True
        with self._changed:
            is_decided = lambda: self._decision is not None or not self._holds  # noqa: E731
            if self._holds and not self._changed.wait_for(is_decided, timeout=self._timeout_s):
                raise CommunicationFault(
                    "ranks that stop did not agree on a microbatch",
                    why=f"some of them did not reply for {self._timeout_s:.0f} s",
                    fix="look for the first error among the other ranks",
                )
            if self._decision is not None and wanted > self._decision:
                return False
            self._begun = wanted
            return True

    def end_pass(self, num_microbatches: int) -> None:
        """Record that a pass of `num_microbatches` ended on this rank.

        Raises:
            PassStopped: some of its microbatches were not begun.
        """
        end = Position(self._begun.pass_number, num_microbatches)
        if self._decision is not None and end > self._decision:
            raise PassStopped(self._begun.num_begun)

    def _watch(self) -> None:
        """Poll for a request to stop, on a thread, and agree on the point with all ranks."""
        request = self._prefix + "request"
        try:
            while not self._ended.wait(self.poll_s):
                if time.monotonic() - self._pass_start < self.poll_s:
                    continue
                if self._wants_stop():
                    self._store.set(request, "")
                if self._store.check([request]):
                    self._agree()
                    return
        # the process that serves the store has ended, which the ranks detect on their own
        except RuntimeError:
            with self._changed:
                self._holds = False
                self._changed.notify_all()

    def _agree(self) -> None:
        """Publish the position of this rank, and read the position at which all ranks stop."""
        with self._changed:
            self._holds = True
            begun = self._begun
        key = self._prefix + "decision"
        size = self._control.size
        text = f"{begun.pass_number} {begun.num_begun}"
        self._store.set(f"{self._prefix}{self._control.index}", text)
        if self._store.add(self._prefix + "count", 1) == size:
            published = self._store.multi_get([f"{self._prefix}{index}" for index in range(size)])
            self._store.set(key, max(published, key=_position).decode())
        while not self._store.check([key]):
            if self._ended.wait(min(self.poll_s, max(MIN_POLL_S, size / RANKS_PER_POLL_S))):
                return
        with self._changed:
            self._decision = _position(self._store.get(key))
            self._changed.notify_all()


def _position(text: bytes) -> Position:
    pass_number, num_begun = text.split()
    return Position(int(pass_number), int(num_begun))
