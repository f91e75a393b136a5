"""`Heartbeat`: the state of a rank, in memory that other processes of its machine can read.

A rank only stores into memory: no lock, no system call, no message. So the record of a frozen or
killed rank can be read like any other. `watch/` reads the records of all ranks when a run makes no
progress.

    record of a rank   counters, phase, action, the collective it waits for
                       and per group name sequence number, operation and bytes of the newest
"""

import time
from collections.abc import Callable
from ctypes import Structure, c_char, c_int64, sizeof
from dataclasses import dataclass, field
from typing import get_args

from nanotrain.topology.groups import GroupName

NO_GROUP = "?"  # groups of tests, and others that are not in a topology
GROUPS: tuple[str, ...] = (NO_GROUP, *get_args(GroupName))
_GROUP_INDEX = {name: index for index, name in enumerate(GROUPS)}
_NAME = c_char * 24


class _CollectiveFields(Structure):
    _fields_ = [("sequence", c_int64), ("num_bytes", c_int64), ("op", _NAME)]


class Record(Structure):
    """The memory layout of the record of a rank, which other processes of the machine read."""

    _fields_ = [
        *((name, c_int64) for name in ("beats", "is_alarmed", "step", "stage", "microbatch")),
        *((name, c_int64) for name in ("wait_sequence", "wait_peer", "waited_ns")),
        *((name, _NAME) for name in ("phase", "kind", "wait_group", "wait_op")),
        ("collectives", _CollectiveFields * len(GROUPS)),
    ]


NUM_FIELDS = sizeof(Record) // 8  # fields of 8 bytes, as in the watchdog's files
RECORD_BYTES = sizeof(Record)


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
    phase: str
    action: str  # "F0.3": forward of microbatch 3 through stage 0; "" outside of a step
    waiting: Waiting | None = None
    collectives: dict[str, Collective] = field(default_factory=dict)  # by group


class Heartbeat:
    """Writes the record of this rank."""

    def __init__(self) -> None:
        self._record = Record(phase=b"start")
        self._wait_start = 0
        # called with what begins: the name of a phase and 1, the kind of an action and 2
        self.observer: Callable[[str, int], None] = lambda name, level: None

    def move_to(self, record: memoryview) -> None:
        """Continue in another record, such as one in shared memory."""
        record.cast("B")[:] = bytes(self._record)
        self._record = Record.from_buffer(record)

    def alarm(self) -> None:
        """Record that this rank has begun to report a hang, for the other ranks of the machine."""
        self._record.is_alarmed = 1

    def begin(self, phase: str, *, step: int | None = None) -> None:
        """Record that a phase of the run begins."""
        record = self._record
        record.phase = phase.encode()
        record.kind = b""
        if step is not None:
            record.step = step
        record.beats += 1
        self.observer(phase, 1)

    def action(self, kind: str, *, stage: int, microbatch: int) -> None:
        """Record that an action of the pipeline schedule begins."""
        record = self._record
        record.kind = kind.encode()
        record.stage = stage
        record.microbatch = microbatch
        record.beats += 1
        self.observer(kind, 2)

    def started(self, group: str, op: str, *, num_bytes: int) -> None:
        """Record that a collective was started over a group."""
        collective = self._newest(group)
        collective.sequence += 1
        collective.op = op.encode()
        collective.num_bytes = num_bytes
        self._record.beats += 1

    def sequence(self, group: str) -> int:
        """Collectives started over a group so far."""
        return self._newest(group).sequence

    def num_bytes(self, group: str, sequence: int) -> int | None:
        """Bytes that this rank sends in the newest collective over a group; None for older ones."""
        newest = self._newest(group)
        return newest.num_bytes if sequence and newest.sequence == sequence else None

    def wait_begins(self, group: str, op: str, *, sequence: int, peer: int | None = None) -> None:
        """Record that this rank waits for a collective from now on."""
        record = self._record
        record.wait_op, record.wait_sequence = op.encode(), sequence
        record.wait_peer = -1 if peer is None else peer
        record.wait_group = group.encode()
        self._wait_start = time.perf_counter_ns()

    def wait_ended(self) -> None:
        """Record that the collective is complete; a failed one stays recorded."""
        record = self._record
        record.waited_ns += time.perf_counter_ns() - self._wait_start
        record.wait_group = b""
        record.beats += 1

    @property
    def beats(self) -> int:
        """A counter that grows with every phase, action and collective of this rank."""
        return self._record.beats

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank waited for collectives; on NCCL the host does not wait."""
        return self._record.waited_ns / 1e9

    def read(self) -> Beat:
        """A copy of the record."""
        return read_record(self._record)

    def _newest(self, group: str) -> _CollectiveFields:
        return self._record.collectives[_GROUP_INDEX.get(group, 0)]


def read_record(record: memoryview | Record) -> Beat:
    """A copy of a record, of this or of another rank."""
    copy = Record.from_buffer_copy(record)
    waiting = None
    if copy.wait_group:
        peer = copy.wait_peer if copy.wait_peer >= 0 else None
        waiting = Waiting(copy.wait_group.decode(), copy.wait_op.decode(), copy.wait_sequence, peer)
    kind = copy.kind.decode()
    return Beat(
        beats=copy.beats,
        is_alarmed=bool(copy.is_alarmed),
        step=copy.step,
        phase=copy.phase.decode(),
        action=f"{kind}{copy.stage}.{copy.microbatch}" if kind else "",
        waiting=waiting,
        collectives={
            group: Collective(newest.sequence, newest.op.decode(), newest.num_bytes)
            for group, newest in zip(GROUPS, copy.collectives, strict=True)
            if newest.sequence
        },
    )
