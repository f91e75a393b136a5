"""What of this machine the process may use: cores and memory, in a container those of its limits.

The limits are files of the process's control group and of every group above it (Linux kernel documentation:
"Control Group v2", and "CFS Bandwidth Control" and "Memory Resource Controller" for version 1).
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

PROC, CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that this process may keep busy; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, core_limit() or cores)


def cores_per_rank() -> int:
    """The cores of this process, shared by the ranks of the machine (LOCAL_WORLD_SIZE of torchrun); at least 1."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, usable_cores() // (int(ranks) or 1)) if ranks.isdecimal() else usable_cores()


def core_limit() -> int | None:
    """Cores of the control group (`docker run --cpus`), rounded up; None without a limit."""
    limits = []
    for group in _groups("cpu"):
        numbers = _read(group / "cpu.max").split() or [
            _read(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        ]
        if all(number.strip().isdecimal() for number in numbers):  # not "max" (version 2), -1 (1) or a missing file
            quota, period = map(int, numbers)
            limits.append(max(1, math.ceil(quota / period)))
    return min(limits, default=None)


def available_memory() -> int | None:
    """Bytes of memory that the process can still get, of the machine and of its control group; None if unknown."""
    available = [1024 * size for size in _sizes(PROC / "meminfo", "MemAvailable:")]
    for group in _groups("memory"):
        for limit, usage, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            sizes = _read(group / limit).strip(), _read(group / usage).strip()
            if all(size.isdecimal() for size in sizes):
                reclaimed = sum(_sizes(group / "memory.stat", cached))
                available.append(max(0, int(sizes[0]) - int(sizes[1]) + reclaimed))
    return min(available, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the process's control group and of those above it; some may not exist in a container."""
    for line in _read(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CONTROL_GROUPS / controller if controllers else CONTROL_GROUPS  # version 2 has one tree for all
        folder = root / path.lstrip("/")
        yield from (folder, *folder.parents[: len(folder.parts) - len(root.parts)])


def _sizes(file: Path, name: str) -> list[int]:
    """The number behind a name in a file of one name and number per line; empty if it is not there."""
    lines = (line.split() for line in _read(file).splitlines())
    return [int(words[1]) for words in lines if len(words) > 1 and words[0] == name]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
