"""What ranks and launcher tell each other of the generations of a job, in its store.

Fault       what ended a generation
Decision    whether the run goes on in the next one; the last rank that joins decides for all
Members     the ranks that are left, where the launcher let one leave the run
FinalError  with which the run ends, where a rank or the launcher knows it before ranks join

Ranks have here the numbers with which they were started, also once others have left.

number          the newest generation
members         the ranks that join, with the first generation of which they are all
fault-N         what ended generation N
at-R            the generation that rank R joined last
N/joined        how many ranks have joined it
N/decision      the decision on it
N/left-R        when rank R left it
N/new-step      the highest step that it completed, if no generation before it had
N/finished      how many ranks have come to the end of the run in it
final-error     the error with which the run ends
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import Store

# generations in a row without a new step, before the run ends; as of whole starts, but that file
# is no part of a training (`runs/verdict.py`)
MAX_IDLE_RESTARTS = 2


@dataclass(frozen=True)
class Fault:
    """The fault of a rank that ended a generation."""

    rank: int  # the rank at fault; another rank may have noticed it
    what: str  # the error, the signal that ended the rank, or the headline of a hang report
    time_s: float  # seconds since the epoch
    step: int = 0  # the running step of that rank; 0 if unknown
    is_death: bool = False  # whether the process of the rank ended
    is_raised: bool = False  # whether the rank has an exception to end the run with

    def is_error_of(self, earlier: "Fault") -> bool:
        """Whether this is the error of an earlier fault, in the same step."""
        return not self.is_death and (self.what, self.step) == (earlier.what, earlier.step)

    @property
    def text(self) -> str:
        """The fault as one line."""
        step = f" in step {self.step}" if self.step else ""
        return f"rank {self.rank}{step}: {self.what}"


@dataclass(frozen=True)
class Restart:
    """The restart with which a generation began."""

    fault: Fault
    noticed_s: float  # when the last of the ranks that lived noticed the fault
    met_s: float  # when all ranks had joined


@dataclass(frozen=True)
class Decision:
    """The decision on a generation: go on, or end the run. The last rank to join makes it."""

    error: str = ""  # why the run ends; empty where it goes on
    rank: int | None = None  # whose exception ends the run; None: all ranks raise the error
    restart: Restart | None = None  # None in the first generation

    @classmethod
    def parse(cls, text: str) -> "Decision":
        """Parse the JSON of a decision."""
        values = json.loads(text)
        restart = values.pop("restart")
        if restart is None:
            return cls(**values)
        fault = Fault(**restart.pop("fault"))
        return cls(**values, restart=Restart(fault, **restart))


@dataclass(frozen=True)
class Members:
    """The ranks of a run."""

    ranks: tuple[int, ...]  # ascending
    since: int = 0  # their first generation


@dataclass(frozen=True)
class FinalError:
    """The error of one rank with which the run ends."""

    text: str
    is_reported: bool = False  # whether that rank has ended, so that nobody waits for its message


class GenerationStore:
    """Facts that the ranks and the launcher share about generations, in the store of a job.

    Args:
        store: the store, or a part of it that no other attempt uses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        store.compare_set("number", "", "0")

    def current(self) -> int:
        """The number of the generation; 0 for the first."""
        return int(self._store.get("number"))

    def end(self, number: int, fault: Fault) -> None:
        """End a generation; if it has ended already, its first fault stays."""
        self._store.compare_set(f"fault-{number}", "", json.dumps(asdict(fault)))
        self._store.compare_set("number", str(number), str(number + 1))

    def members(self, number: int, world_size: int) -> Members:
        """The ranks that join a generation.

        Args:
            number: the generation.
            world_size: ranks that were started.
        """
        members = Members(tuple(range(world_size)))
        for row in self._member_rows():
            if row.since <= number:
                members = row
        return members

    def _member_rows(self) -> list[Members]:
        """The members since each generation in which a rank left; [] while all are members."""
        if not self._store.check(["members"]):
            return []
        rows = json.loads(self._store.get("members"))
        return [Members(tuple(row["ranks"]), row["since"]) for row in rows]

    def let_leave(self, ranks: Sequence[int], fault: Fault) -> None:
        """End the newest generation; fewer ranks join the following ones. The launcher calls this.

        Args:
            ranks: ranks that stay, ascending.
            fault: the fault of the rank that leaves.
        """
        before = self._member_rows()
        is_first_fault = False
        while not is_first_fault:  # else ranks may have read the members before they were changed
            number = self.current()
            rows = [*before, Members(tuple(ranks), number + 1)]
            self._store.set("members", json.dumps([asdict(row) for row in rows]))
            self.end(number, fault)
            is_first_fault = self.fault(number) == fault

    def note_new_step(self, number: int, step: int) -> None:
        """Note that a generation has completed a step that no generation before it had.

        The store sends no reply, so that a step does not wait for it: 21 us between two processes.
        """
        self._store.set(f"{number}/new-step", str(step))

    def has_new_step(self, numbers: Iterable[int]) -> bool:
        """Whether one of several generations has completed a new step."""
        return any(self._store.check([f"{number}/new-step"]) for number in numbers)

    def highest_step(self, number: int) -> int:
        """The highest step that was completed before a generation; 0 for none."""
        for before in reversed(range(number)):
            if self.has_new_step([before]):
                return int(self._store.get(f"{before}/new-step"))
        return 0

    def generation_of(self, rank: int) -> int | None:
        """The generation that a rank joined last; None if it has joined none."""
        key = f"at-{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else None

    def end_generation_of(self, fault: Fault) -> None:
        """End the generation that a rank joined last, which has died; none if it had not joined."""
        number = self.generation_of(fault.rank)
        if number is not None:
            self.end(number, fault)

    def is_finished(self, world_size: int) -> bool:
        """Whether all ranks have finished the newest generation.

        Args:
            world_size: ranks that were started.
        """
        number = self.current()
        num_ranks = len(self.members(number, world_size).ranks)
        return self._store.add(f"{number}/finished", 0) == num_ranks

    def finish(self, number: int) -> None:
        """Count a rank that has finished."""
        self._store.add(f"{number}/finished", 1)

    def join(self, number: int, rank: int) -> int:
        """Count a rank in; returns how many have joined."""
        self._store.set(f"at-{rank}", str(number))
        return self._store.add(f"{number}/joined", 1)

    def num_joined(self, number: int) -> int:
        """How many ranks have joined a generation."""
        return self._store.add(f"{number}/joined", 0)

    def leave(self, number: int, rank: int) -> None:
        """Note when a rank left a generation that ended."""
        self._store.set(f"{number}/left-{rank}", str(time.time()))

    def decide(self, number: int, decision: Decision) -> None:
        """Publish the decision of the last rank that joined."""
        self._store.set(f"{number}/decision", json.dumps(asdict(decision)))

    def decision(self, number: int) -> Decision | None:
        """The decision on a generation; None before it."""
        key = f"{number}/decision"
        if not self._store.check([key]):
            return None
        return Decision.parse(self._store.get(key).decode())

    def fault(self, number: int) -> Fault:
        """The fault of a generation that has ended."""
        return Fault(**json.loads(self._store.get(f"fault-{number}")))

    def departures(self, number: int, world_size: int) -> list[float]:
        """When ranks left a generation, in seconds since the epoch; without ranks that died."""
        times = []
        for rank in range(world_size):
            key = f"{number}/left-{rank}"
            if self._store.check([key]):
                times.append(float(self._store.get(key)))
        return times

    def publish_final_error(self, error: FinalError) -> None:
        """Publish that the run ends with the error of a rank."""
        self._store.set("final-error", json.dumps(asdict(error)))

    def final_error(self) -> FinalError | None:
        """The error with which the run ends; None while it goes on."""
        if not self._store.check(["final-error"]):
            return None
        return FinalError(**json.loads(self._store.get("final-error")))


def decide(store: GenerationStore, number: int, *, world_size: int, max_restarts: int) -> Decision:
    """Decide whether the run goes on in a generation that all ranks have joined.

    It ends where the same error came twice in one step, which points to code or data; where
    `MAX_IDLE_RESTARTS` generations in a row made no new step; and after `max_restarts`.
    """
    if number == 0:
        return Decision()
    fault = store.fault(number - 1)
    departures = store.departures(number - 1, world_size)
    noticed_s = max(departures, default=fault.time_s)
    restart = Restart(fault, noticed_s=noticed_s, met_s=time.time())
    rank = fault.rank if fault.is_raised else None
    if number > 1 and fault.is_error_of(store.fault(number - 2)):
        return Decision(f"the same error twice: {fault.text}", rank, restart)
    idle = _idle_generations(store, number, world_size=world_size)
    if idle >= MAX_IDLE_RESTARTS:
        return Decision(f"{idle + 1} faults without a new step: {fault.text}", rank, restart)
    if number > max_restarts:
        error = f"restart in place {number} of at most {max_restarts}: {fault.text}"
        return Decision(error, rank, restart)
    return Decision(restart=restart)


def _idle_generations(store: GenerationStore, number: int, *, world_size: int) -> int:
    """Number of consecutive generations before this one without a new step.

    The first generation of a set of members does not count.
    """
    first = store.members(number, world_size).since
    idle = 0
    while number - 1 - idle > first and not store.has_new_step([number - 1 - idle]):
        idle += 1
    return idle
