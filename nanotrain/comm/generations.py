"""Generations of a job: its ranks form their groups anew after a fault, in the same processes.

    Generations   this rank's part of the agreement, in the store of the job
    Generation    one life of the process groups, watched by a thread

    a rank with an error     ends the generation, by one compare-and-set in the store
    the launcher             ends the generation of a rank that died, and starts that rank again
    a thread of every rank   sees the end, and shuts down the connections of this rank, so that no
                             collective waits for a rank that is gone
    every rank               leaves its groups, and joins the next generation; the run goes on from
                             the newest checkpoint once all ranks have joined

The store outlives every rank: the launcher serves it (under `torchrun` its agent, or the first
rank, which may then only raise an error and not die).

With `--inprocess-min-ranks` the launcher may let a rank leave the run. Those that stay keep their
order and get new numbers in the next generation; here and in the store a rank has the number with
which it was started.

Source: the in-process restart of NVIDIA's resiliency extension, `--inprocess-restart` in
Megatron-LM, from which the settings come. A generation is an iteration there, a word that is taken
by the training steps.
"""

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from nanotrain.comm.connections import open_sockets, shut_down_connections
from nanotrain.comm.generation_store import (
    Decision,
    Fault,
    FinalError,
    GenerationStore,
    Restart,
    decide,
)
from nanotrain.comm.meeting import meet
from nanotrain.comm.work import CommunicationFault
from nanotrain.errors import EnvironmentFault, LocalFault, NanotrainError, ReportedFault
from nanotrain.waiting import Wait

# set by a launcher that starts a rank that died again, alone
SUPERVISED = "NANOTRAIN_SUPERVISED"
PREFIX = "nanotrain-generations/"
POLL_S = 0.1
RANKS_PER_POLL_S = 5_000  # polls of larger worlds are less frequent: one process serves the store
SOFT_TIMEOUT_S = 3.0  # from the end of a generation to an exception in the main thread
HARD_TIMEOUT_S = 30.0  # to the end of a process that does not leave its generation
# from an error to the end of the generation that explains it: of a failed collective, of another
WAIT_FOR_END_S = 3.0
WAIT_AFTER_OTHERS_S = 0.5
WAIT_FOR_REPORT_S = 10.0  # in which a rank with an error of its own reports it
JOIN_POLL_S = 0.05
INTERRUPT_POLL_S = 0.2
MAX_TEXT = 500  # characters of a fault
INTERRUPT = signal.SIGUSR2  # to the main thread of this process, by a thread of it


class GenerationEnded(CommunicationFault):
    """The generation of this rank was ended, by another rank or by the launcher."""


class ErrorOfAnother(ReportedFault):
    """This rank ends for another one, by whose end the failure is judged (`runs/verdict.py`)."""


def is_supervised() -> bool:
    """Whether the launcher of this rank starts a rank that died again, alone."""
    return SUPERVISED in os.environ


class Generations:
    """This rank's part of the agreement.

    Args:
        rank: global rank.
        world_size: number of ranks.
        timeout: for the ranks to join.
        max_restarts: restarts in place after which a fault ends the run.
        become_first: called before this rank joins as the first of those that are left.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        timeout: timedelta,
        max_restarts: int,
        become_first: Callable[[], object] = lambda: None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.is_supervised = is_supervised()
        self.timeout = timeout
        self.max_restarts = max_restarts
        self._become_first = become_first
        self._error: Exception | None = None  # that ended the last generation, if of this rank
        self._prefix = PREFIX
        self._meeting: Store | None = None  # kept, for it may serve the store
        if not self.is_supervised:
            self._meeting = meet(rank, world_size, timeout=timeout)
            if rank == 0:
                self._meeting.set("generations", uuid.uuid4().hex)
            self._prefix = f"{PREFIX}{self._meeting.get('generations').decode()}/"
        self.store = GenerationStore(self._connect())

    def _connect(self) -> Store:
        """A connection of its own to the store of the job."""
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=self.timeout)
        return PrefixStore(self._prefix, store)

    def poll_s(self, least_s: float) -> float:
        """Seconds between two looks of this rank into the store, of which one process serves all.

        Args:
            least_s: seconds in a small world.
        """
        return max(least_s, self.world_size / RANKS_PER_POLL_S)

    def join(self) -> "Generation | None":
        """Wait until all ranks have joined the newest generation.

        Returns:
            The generation; None where this rank has left the run, which goes on without it.

        Raises:
            EnvironmentFault: the run ends: too many restarts, an error that came twice, no new
                step; or a rank does not come. Where it is the error of one rank, that rank raises
                it.
        """
        decision = None
        while decision is None:
            number = self.store.current()
            members = self.store.members(number, self.world_size).ranks
            if self.rank not in members:
                return None
            if self.rank == members[0]:
                self._become_first()
            decision = self._decision(number, num_ranks=len(members))
        if decision.error:
            raise self._final_error(decision)
        self._error = None
        kept = frozenset(open_sockets())
        store = PrefixStore(f"groups-{number}/", self._connect())
        return Generation(
            self, number, members=members, store=store, kept=kept, restart=decision.restart
        )

    def _decision(self, number: int, *, num_ranks: int) -> Decision | None:
        """Join a generation; returns the decision on it, None if it has ended."""
        store = self.store
        if store.join(number, self.rank) == num_ranks:
            rules = {"world_size": self.world_size, "max_restarts": self.max_restarts}
            store.decide(number, decide(store, number, **rules))
        wait = Wait("", self.timeout.total_seconds())
        while (decision := store.decision(number)) is None:
            if store.current() != number:
                return None
            joined = store.num_joined(number)
            wait.what = f"rank {self.rank} waits: {joined} of {num_ranks} ranks have joined"
            if final := store.final_error():
                raise _error_of_another(final)
            if wait.is_over:
                cause = f" after fault {number}" if number else ""
                raise EnvironmentFault(
                    f"{joined} of {num_ranks} ranks joined{cause}",
                    why=f"the others did not come within {wait.timeout_s:g} s",
                    fix="start the run again: it goes on from the newest checkpoint",
                )
            wait.pause(self.poll_s(JOIN_POLL_S))
        return decision

    def _final_error(self, decision: Decision) -> Exception:
        """The error with which the run ends on this rank."""
        if decision.rank == self.rank:
            ended = "the process of this rank ended before it could raise its error again"
            return self._error or LocalFault(ended, why=decision.error)
        if decision.rank is not None:
            return _error_of_another(FinalError(decision.error))
        return EnvironmentFault(
            "no further restart in place",
            why=decision.error,
            fix="find the cause; the same command goes on from the newest checkpoint",
        )

    @property
    def has_own_error(self) -> bool:
        """Whether an error of this rank ended its last generation, not the end of another rank."""
        return self._error is not None

    def leave(self, generation: "Generation", error: Exception) -> None:
        """Leave a generation after an error, and end it unless it has ended.

        Raises:
            Exception: the error itself, where the run ends with it.
        """
        if not generation.wait_for_end(error):
            self._require_restart(error)
            self._error = error
            generation.end(_describe(error), is_raised=True)
        self.store.leave(generation.number, self.rank)

    def _require_restart(self, error: Exception) -> None:
        """Raise an error with which the run ends, and publish it."""
        if _ends_run(error) or not (self.is_supervised or _is_own(error)):
            self.store.publish_final_error(FinalError(_describe(error)))
            raise error


def _error_of_another(final: FinalError) -> ErrorOfAnother:
    """The error of a rank that ends for another one, once that has had time to report its own."""
    if not final.is_reported:
        time.sleep(WAIT_FOR_REPORT_S)  # the launcher ends this rank when the other has ended
    return ErrorOfAnother("the run ends with the error of another rank", why=final.text)


def _ends_run(error: Exception) -> bool:
    """Whether an error ends the run: all ranks raise it, or a person has to act."""
    is_of_one_rank = isinstance(error, LocalFault | CommunicationFault | ReportedFault)
    return isinstance(error, NanotrainError) and not is_of_one_rank


def _is_own(error: Exception) -> bool:
    """Whether an error is this rank's own, and no failed collective."""
    is_failed_collective = isinstance(error, CommunicationFault | ReportedFault | dist.DistError)
    return not is_failed_collective


def _describe(error: Exception) -> str:
    """The type of an error and its first line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class Generation:
    """One life of the process groups of a rank.

    Args:
        generations: this rank's part of the agreement.
        number: 0 for the first.
        members: ranks that joined it, ascending, with the numbers with which they were started.
        store: store for the groups, on a connection of its own.
        kept: sockets that belong to no generation.
        restart: the restart with which it began; None for the first.
    """

    def __init__(
        self,
        generations: Generations,
        number: int,
        *,
        members: Sequence[int],
        store: Store,
        kept: frozenset[str],
        restart: Restart | None,
    ) -> None:
        self.number = number
        self.members = tuple(members)
        self.store = store
        self.restart = restart
        self.max_restarts = generations.max_restarts
        self.is_supervised = generations.is_supervised  # whether a rank that dies is started again
        self.connected_s = 0.0  # when the groups were there, in seconds since the epoch
        self.read_step: Callable[[], int] = lambda: 0
        self._generations = generations
        self._kept = kept
        self._highest_step: int | None = None  # that was completed; read with the first step
        self._ended = threading.Event()
        self._left = threading.Event()
        self._main = threading.current_thread()
        self._thread = threading.Thread(
            target=self._watch,
            args=(generations.poll_s(POLL_S),),
            name="generation",
            daemon=True,
        )

    @property
    def has_ended(self) -> bool:
        """Whether it was ended, as far as this rank knows."""
        return self._ended.is_set()

    @property
    def step(self) -> int:
        """The running step of this rank."""
        return self.read_step()

    def connected(self, read_step: Callable[[], int]) -> None:
        """Note that the process groups exist; `read_step` returns the running step."""
        self.connected_s = time.time()
        self.read_step = read_step

    @property
    def num_left(self) -> int:
        """How many ranks have left the run."""
        return self._generations.world_size - len(self.members)

    def completed(self, step: int) -> None:
        """Note that a step is done, if none so high was before; the first rank calls this.

        Each new step is noted, because this process may be killed before the next one.
        """
        store = self._generations.store
        if self._highest_step is None:
            self._highest_step = store.highest_step(self.number)
        if step > self._highest_step:
            self._highest_step = step
            store.note_new_step(self.number, step)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch for the end of the generation in the block, on a thread.

        At its normal end the block waits until all ranks have come there.

        Raises:
            GenerationEnded: it ended while this rank waited for the others.
        """
        with handling_interrupts():
            self._thread.start()
            try:
                yield
                self._finish()
            finally:
                self._left.set()
                self._thread.join()

    def end(self, what: str, *, rank: int | None = None, is_raised: bool = False) -> None:
        """End the generation on all ranks; from any thread.

        Args:
            what: the fault, in one line.
            rank: the rank at fault, with its number in this generation; None for this one.
            is_raised: whether it is an exception of this rank, which is kept for the end of a run.
        """
        rank = self._generations.rank if rank is None else self.members[rank]
        fault = Fault(rank, what[:MAX_TEXT], time.time(), step=self.step, is_raised=is_raised)
        self._generations.store.end(self.number, fault)

    def wait_for_end(self, error: Exception) -> bool:
        """Wait for the end of the generation from which an error follows; False if it goes on."""
        timeout_s = WAIT_AFTER_OTHERS_S if _is_own(error) else WAIT_FOR_END_S
        deadline = time.monotonic() + timeout_s
        while not self._has_ended_in_store():
            if time.monotonic() > deadline:
                return False
            time.sleep(JOIN_POLL_S)
        return True

    def wait_for_restart(self, error: Exception) -> bool:
        """Whether a restart in place follows a failed collective; waits until that is known.

        If not, the run ends, and the rank has to report the error.
        """
        return self.is_supervised or self.wait_for_end(error)

    def _has_ended_in_store(self) -> bool:
        """Whether the store has a later generation."""
        return self._generations.store.current() != self.number

    def _finish(self) -> None:
        """Wait until all ranks have come to the end of the run."""
        store = self._generations.store
        store.finish(self.number)
        with suppress(dist.DistError):  # the first rank may serve it, and ends once all are there
            while not store.is_finished(self._generations.world_size):
                if self._ended.wait(timeout=self._generations.poll_s(JOIN_POLL_S)):
                    raise GenerationEnded("another rank failed after this one had finished")

    def _watch(self, poll_s: float) -> None:
        """Wait for the end of the generation, then interrupt the main thread; on a thread."""
        with suppress(RuntimeError):  # the process that serves the store has ended
            while not self._has_ended_in_store():
                if self._left.wait(timeout=poll_s):
                    return
            self._ended.set()
            self._interrupt()

    def _interrupt(self) -> None:
        """End all waits of the main thread, until it leaves the generation."""
        ended = time.monotonic()
        was_interrupted = False
        while True:
            shut_down_connections(keep=self._kept)
            if self._left.wait(timeout=INTERRUPT_POLL_S):
                return
            passed_s = time.monotonic() - ended
            if passed_s > SOFT_TIMEOUT_S and not was_interrupted:
                was_interrupted = True
                if self._main is threading.main_thread():
                    signal.pthread_kill(self._main.ident or 0, INTERRUPT)
            if passed_s > HARD_TIMEOUT_S and self._generations.is_supervised:
                os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def handling_interrupts() -> Iterator[None]:
    """Raise `GenerationEnded` in the main thread where a thread of this process interrupts it.

    Nothing is changed in other threads, which cannot handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        raise GenerationEnded("another rank failed while this one waited")

    signal.signal(INTERRUPT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(INTERRUPT, signal.SIG_IGN)  # one may be under way
