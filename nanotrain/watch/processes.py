"""The ranks of a run as processes, and their heartbeats in one shared file per machine.

all ranks     exchange host and process id
first rank    of each machine creates a file in /dev/shm (else in the temporary folder); all ranks of the machine map
              it, then it is unlinked, so nothing is left behind however the run ends
"""

import mmap
import os
import platform
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanotrain.comm.collectives import all_gather_object, barrier
from nanotrain.comm.group import Group
from nanotrain.comm.heartbeat import NUM_FIELDS, RECORD_BYTES, Heartbeat

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class RankProcess:
    """The process of one rank."""

    rank: int
    host: str
    pid: int
    started: int  # start time in ticks since boot; 0 if unknown
    machine: str  # equal for processes that can share memory and signal each other by process id

    @classmethod
    def current(cls, rank: int) -> "RankProcess":
        """This process."""
        boot = _read(Path("/proc/sys/kernel/random/boot_id"))
        pid = os.getpid()
        return cls(
            rank,
            platform.node(),
            pid,
            start_time(pid),
            f"{platform.node()} {boot} {_pid_namespace()}",
        )


def share_heartbeats(
    heartbeat: Heartbeat, control: Group
) -> tuple[list[RankProcess], dict[int, memoryview]]:
    """Move the heartbeat of this rank to memory that the ranks of this machine share. Every rank
    calls this.

    Args:
        heartbeat: heartbeat of this rank.
        control: group of all ranks.

    Returns:
        all processes by rank, and the records of the ranks of this machine by rank.
    """
    this = RankProcess.current(control.rank)
    processes: list[RankProcess] = all_gather_object(this, control)
    local = [process.rank for process in processes if process.machine == this.machine]
    path = _create(len(local)) if this.rank == local[0] else None
    paths: list[str | None] = all_gather_object(path, control)
    records = _map(paths[control.ranks.index(local[0])], local)
    barrier(control)  # all have mapped it
    if path is not None:
        os.unlink(path)
    if this.rank not in records:
        return processes, {this.rank: memoryview(bytearray(RECORD_BYTES)).cast("q")}
    heartbeat.move_to(records[this.rank])
    return processes, records


def state_of(process: RankProcess) -> str:
    """The state of a local process: R running, S waiting, D waiting for a disk, T stopped; "" if it
    ended.
    """
    fields = _stat(process.pid)
    if not fields or process.started not in (0, int(fields[19])) or fields[0] in "ZX":
        return ""
    return fields[0].upper()


def start_time(pid: int) -> int:
    """The start time of a process in ticks since boot; 0 if unknown. A later process with its id
    has another.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def tcp_ports() -> list[int]:
    """The local ports of this process's TCP sockets, by which other ranks name them in their
    errors.
    """
    links = (os.path.realpath(path) for path in Path("/proc/self/fd").glob("*"))
    sockets = {link.rpartition("socket:[")[2][:-1] for link in links}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in _read(Path("/proc/self/net", name)).splitlines()[1:]
    ]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in rows if row[9] in sockets})


def lost_port(error: str) -> int | None:
    """The port at the other end of a connection that torch's error names.

    gloo prints the bytes of a port in reverse.

    >>> lost_port("gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12673."), lost_port("no route")
    (33073, None)
    >>> lost_port("Connection closed by remote peer node7<33073>")
    33073
    """
    of_gloo, of_nccl = re.search(r"peer \[\S*\]:(\d+)", error), re.search(r"peer \S+<(\d+)>", error)
    if of_gloo:
        return int.from_bytes(int(of_gloo[1]).to_bytes(2, "little"), "big")
    return int(of_nccl[1]) if of_nccl else None


def _create(num_ranks: int) -> str | None:
    folder = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    try:
        file, path = tempfile.mkstemp(prefix="nanotrain-heartbeats-", dir=folder)
        os.truncate(path, num_ranks * RECORD_BYTES)
        os.close(file)
    except OSError:
        return None
    return path


def _map(path: str | None, ranks: Sequence[int]) -> dict[int, memoryview]:
    """The records of ranks in a file; none if it cannot be mapped, as in containers that share only
    a host name.
    """
    try:
        with open(path or "", "r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), len(ranks) * RECORD_BYTES)).cast("q")
    except (OSError, ValueError):
        return {}
    return {
        rank: memory[index * NUM_FIELDS : (index + 1) * NUM_FIELDS]
        for index, rank in enumerate(ranks)
    }


def _pid_namespace() -> str:
    """The PID namespace: an equal process id in another container is another process."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command, which may contain blanks; empty if there are
    none.
    """
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
