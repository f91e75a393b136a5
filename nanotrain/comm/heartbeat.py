"""`Heartbeat`: what a rank is doing, in memory that other processes of its machine can read.

A rank only stores integers: no lock, no system call, no message. So the record of a frozen or killed rank can be read
like any other. `watch/` reads the records of all ranks when a run makes no progress.

    record of a rank   int64 fields: counters, phase, action, the collective it waits for
                       and per group name: sequence number, operation and bytes of the last collective
"""

import time
from dataclasses import dataclass, field
from typing import get_args

from nanotrain.topology.groups import GroupName

NO_GROUP = "?"  # groups of tests, and others that are not in a topology
GROUPS: tuple[str, ...] = (NO_GROUP, *get_args(GroupName))
OPS = (
    "?",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "p2p",
    "all_reduce_scalars",
    "all_gather_object",
    "gather_object",
    "broadcast_object",
)
PHASES = ("start", "data", "step", "hooks", "validation", "checkpoint", "finished", "failed")
KINDS = ("", "F", "B", "I", "W")

_GROUP_INDEX = {name: index for index, name in enumerate(GROUPS)}
_OP_INDEX = {name: index for index, name in enumerate(OPS)}
_PHASE_INDEX = {name: index for index, name in enumerate(PHASES)}
_KIND_INDEX = {name: index for index, name in enumerate(KINDS)}
_BEATS, _ALARM, _STEP, _PHASE, _KIND, _STAGE, _MICROBATCH = range(7)
_WAIT_GROUP, _WAIT_OP, _WAIT_SEQUENCE, _WAIT_PEER, _WAITED_NS = range(7, 12)
_GROUP_FIELDS, _PER_GROUP = 12, 3
NUM_FIELDS = _GROUP_FIELDS + _PER_GROUP * len(GROUPS)
RECORD_BYTES = 8 * NUM_FIELDS


@dataclass(frozen=True)
class Collective:
    """The last collective that a rank started over a group."""

    sequence: int  # 1 for the first collective of this rank over the group
    op: str
    num_bytes: int  # sent by this rank


@dataclass(frozen=True)
class Waiting:
    """The collective that a rank waits for."""

    group: str
    op: str
    sequence: int
    peer: int | None = None  # global rank of the sender of a p2p message


@dataclass(frozen=True)
class Beat:
    """A copy of a record."""

    beats: int  # grows with all that the rank begins
    is_alarmed: bool  # whether this rank gave up
    step: int  # the running step, or the last one
    phase: str  # one of PHASES
    action: str  # "F0.3": forward of microbatch 3 through stage 0; "" outside of a step
    waiting: Waiting | None = None
    collectives: dict[str, Collective] = field(default_factory=dict)  # by group


class Heartbeat:
    """Writes the record of this rank.

    Args:
        record: NUM_FIELDS int64 fields; None for memory of this process only.
    """

    def __init__(self, record: memoryview | None = None) -> None:
        self._record = memoryview(bytearray(RECORD_BYTES)).cast("q") if record is None else record
        self._wait_start = 0

    def move_to(self, record: memoryview) -> None:
        """Continue in another record, such as one in shared memory."""
        record[:] = self._record
        self._record = record

    def alarm(self) -> None:
        """Mark this rank as given up, which the other ranks of the machine read."""
        self._record[_ALARM] = 1

    def begin(self, phase: str, *, step: int | None = None) -> None:
        """Record that a phase of the run begins."""
        record = self._record
        record[_PHASE], record[_KIND] = _PHASE_INDEX[phase], 0
        if step is not None:
            record[_STEP] = step
        record[_BEATS] += 1

    def action(self, kind: str, *, stage: int, microbatch: int) -> None:
        """Record that an action of the pipeline schedule begins."""
        record = self._record
        record[_KIND], record[_STAGE], record[_MICROBATCH] = _KIND_INDEX[kind], stage, microbatch
        record[_BEATS] += 1

    def started(self, group: str, op: str, *, num_bytes: int) -> None:
        """Record that a collective was started over a group."""
        record, index = self._record, _GROUP_FIELDS + _PER_GROUP * _GROUP_INDEX.get(group, 0)
        record[index] += 1
        record[index + 1], record[index + 2] = _OP_INDEX.get(op, 0), num_bytes
        record[_BEATS] += 1

    def sequence(self, group: str) -> int:
        """Collectives started over a group so far."""
        return self._record[_GROUP_FIELDS + _PER_GROUP * _GROUP_INDEX.get(group, 0)]

    def num_bytes(self, group: str, sequence: int) -> int | None:
        """Bytes that this rank sends in a collective over a group; None unless it is the newest one."""
        index = _GROUP_FIELDS + _PER_GROUP * _GROUP_INDEX.get(group, 0)
        return self._record[index + 2] if sequence and self._record[index] == sequence else None

    def wait_begins(self, group: str, op: str, *, sequence: int, peer: int | None = None) -> None:
        """Record that this rank waits for a collective from now on."""
        record = self._record
        record[_WAIT_OP], record[_WAIT_SEQUENCE] = _OP_INDEX.get(op, 0), sequence
        record[_WAIT_PEER] = -1 if peer is None else peer
        record[_WAIT_GROUP] = 1 + _GROUP_INDEX.get(group, 0)
        self._wait_start = time.perf_counter_ns()

    def wait_ended(self) -> None:
        """Record that the collective is complete; not called for one that failed, which stays recorded."""
        record = self._record
        record[_WAITED_NS] += time.perf_counter_ns() - self._wait_start
        record[_WAIT_GROUP] = 0
        record[_BEATS] += 1

    @property
    def beats(self) -> int:
        """A counter that grows with every phase, action and collective of this rank."""
        return self._record[_BEATS]

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank waited for collectives; on NCCL the host does not wait."""
        return self._record[_WAITED_NS] / 1e9

    def read(self) -> Beat:
        """A copy of the record."""
        return read_record(self._record)


def read_record(record: memoryview) -> Beat:
    """A copy of a record, of this or of another rank."""
    values = record.tolist()
    waiting = None
    if values[_WAIT_GROUP]:
        peer = values[_WAIT_PEER] if values[_WAIT_PEER] >= 0 else None
        group, op = GROUPS[values[_WAIT_GROUP] - 1], OPS[values[_WAIT_OP]]
        waiting = Waiting(group, op, values[_WAIT_SEQUENCE], peer)
    collectives = {}
    for index, name in enumerate(GROUPS):
        sequence, op_index, num_bytes = values[_GROUP_FIELDS + _PER_GROUP * index :][:_PER_GROUP]
        if sequence:
            collectives[name] = Collective(sequence, OPS[op_index], num_bytes)
    kind = KINDS[values[_KIND]]
    return Beat(
        beats=values[_BEATS],
        is_alarmed=bool(values[_ALARM]),
        step=values[_STEP],
        phase=PHASES[values[_PHASE]],
        action=f"{kind}{values[_STAGE]}.{values[_MICROBATCH]}" if kind else "",
        waiting=waiting,
        collectives=collectives,
    )
