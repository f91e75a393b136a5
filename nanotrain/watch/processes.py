"""The ranks of a run as processes, and their heartbeats in one shared file per machine.

All ranks exchange host and process id. The first rank of each machine creates a file in /dev/shm,
else in the temporary folder. All ranks of the machine map it, then it is unlinked, so nothing is
left behind however the run ends.
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
        boot = _read_text(Path("/proc/sys/kernel/random/boot_id"))
        pid = os.getpid()
        host = platform.node()
        machine = f"{host} {boot} {_pid_namespace()}"
        return cls(rank, host, pid, start_time(pid), machine)


def share_heartbeats(
    heartbeat: Heartbeat, control: Group
) -> tuple[list[RankProcess], dict[int, memoryview]]:
    """Move the heartbeat of this rank to memory that the ranks of its machine share.

    Every rank calls this.

    Args:
        heartbeat: heartbeat of this rank.
        control: group of all ranks.

    Returns:
        all processes by rank, and the records of the ranks of this machine by rank.
    """
    this = RankProcess.current(control.rank)
    processes: list[RankProcess] = all_gather_object(this, control)
    local = [process.rank for process in processes if process.machine == this.machine]
    path = _create_file(len(local)) if this.rank == local[0] else None
    paths: list[str | None] = all_gather_object(path, control)
    records = _map_records(paths[control.ranks.index(local[0])], local)
    barrier(control)  # all have mapped it
    if path is not None:
        os.unlink(path)
    if this.rank not in records:
        return processes, {this.rank: memoryview(bytearray(RECORD_BYTES)).cast("q")}
    heartbeat.move_to(records[this.rank])
    return processes, records


def state_of(process: RankProcess) -> str:
    """The state of a local process: R running, S waiting, D waiting for a disk, T stopped.

    "" if the process ended.
    """
    fields = _stat(process.pid)
    if not fields or process.started not in (0, int(fields[19])) or fields[0] in "ZX":
        return ""
    return fields[0].upper()


def start_time(pid: int) -> int:
    """The start time of a process in ticks since boot; 0 if unknown.

    A later process with the same id has another start time.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def tcp_ports() -> list[int]:
    """The local ports of this process's TCP sockets; errors of other ranks name them."""
    links = [os.path.realpath(path) for path in Path("/proc/self/fd").glob("*")]
    own_sockets = {link.rpartition("socket:[")[2][:-1] for link in links}
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in _read_text(Path("/proc/self/net", name)).splitlines()[1:]:
            fields = line.split()
            local_address = fields[1]
            socket = fields[9]
            if socket in own_sockets:
                ports.add(int(local_address.rpartition(":")[2], 16))
    return sorted(ports)


def lost_port(error: str) -> int | None:
    """The port at the other end of a connection that torch's error names.

    gloo prints the bytes of a port in reverse.

    >>> lost_port("gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12673.")
    33073
    >>> lost_port("Connection closed by remote peer node7<33073>")
    33073
    >>> lost_port("no route") is None
    True
    """
    gloo_peer = re.search(r"peer \[\S*\]:(\d+)", error)
    if gloo_peer:
        return int.from_bytes(int(gloo_peer[1]).to_bytes(2, "little"), "big")
    nccl_peer = re.search(r"peer \S+<(\d+)>", error)
    return int(nccl_peer[1]) if nccl_peer else None


def _create_file(num_ranks: int) -> str | None:
    """A file for the records of ranks; None if it cannot be created."""
    folder = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    try:
        file, path = tempfile.mkstemp(prefix="nanotrain-heartbeats-", dir=folder)
        os.truncate(path, num_ranks * RECORD_BYTES)
        os.close(file)
    except OSError:
        return None
    return path


def _map_records(path: str | None, ranks: Sequence[int]) -> dict[int, memoryview]:
    """Map the records of ranks in a shared file, by rank.

    Empty if the file cannot be mapped, as in containers that share only a host name.
    """
    try:
        with open(path or "", "r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), len(ranks) * RECORD_BYTES)).cast("q")
    except (OSError, ValueError):
        return {}
    records = {}
    for index, rank in enumerate(ranks):
        start = index * NUM_FIELDS
        records[rank] = memory[start : start + NUM_FIELDS]
    return records


def _pid_namespace() -> str:
    """The PID namespace: an equal process id in another container is another process."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command; empty if there is no such process.

    The command may contain blanks and parentheses.
    """
    return _read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _read_text(path: Path) -> str:
    """The text of a file; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
