"""Limits of containers: files of control groups of both versions, as the kernel writes them."""

import os
from pathlib import Path

import pytest

from nanotrain.system import host

MEMORY = "MemTotal:       9000000 kB\nMemFree:         1000 kB\nMemAvailable:    8000000 kB\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write files below /, in the test's folder; the machine has 8 cores and 8.192 GB available."""
    monkeypatch.setattr(host, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "CONTROL_GROUPS", tmp_path / "sys/fs/cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    write({"proc/meminfo": MEMORY})
    return write


def test_without_control_groups_the_machine_counts(write) -> None:
    assert (host.usable_cores(), host.core_limit(), host.available_memory()) == (8, None, 8_192_000_000)


def test_nothing_is_known_without_proc(write, tmp_path: Path) -> None:
    (tmp_path / "proc" / "meminfo").unlink()
    assert host.available_memory() is None


@pytest.mark.parametrize(
    ("cpu", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1), ("6400000 100000", 8)],
)
def test_cores_of_version_2(write, cpu: str, cores: int) -> None:
    write({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{cpu}\n"})
    assert host.usable_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3), ("250000", 3)])
def test_cores_of_version_1(write, quota: str, cores: int) -> None:
    group = "sys/fs/cgroup/cpu/"  # in a container that of the host's path is the root
    write({"proc/self/cgroup": "4:cpu,cpuacct:/docker/a\n3:memory:/docker/a\n0::/\n"})
    write({f"{group}cpu.cfs_quota_us": f"{quota}\n", f"{group}cpu.cfs_period_us": "100000\n"})
    assert host.usable_cores() == cores


def test_memory_of_version_2_is_that_of_the_tightest_group_above(write) -> None:
    group = "sys/fs/cgroup/"
    write({"proc/self/cgroup": "0::/pod/container\n"})
    write({f"{group}pod/container/memory.max": "max\n", f"{group}pod/container/memory.current": "70\n"})
    assert host.available_memory() == 8_192_000_000
    write({f"{group}pod/memory.max": "4000\n", f"{group}pod/memory.current": "1000\n"})
    assert host.available_memory() == 3000
    write({f"{group}pod/memory.stat": "anon 1\ninactive_file 600\nactive_file 5\n"})
    assert host.available_memory() == 3600
    write({f"{group}pod/memory.current": "9000\n"})
    assert host.available_memory() == 0


def test_memory_of_version_1(write) -> None:
    group = "sys/fs/cgroup/memory/a/"
    write({"proc/self/cgroup": "4:cpu:/\n3:memory:/a\n"})
    write({f"{group}memory.limit_in_bytes": "9223372036854771712\n", f"{group}memory.usage_in_bytes": "500\n"})
    assert host.available_memory() == 8_192_000_000
    write({f"{group}memory.limit_in_bytes": "4000\n"})
    write({f"{group}memory.stat": "inactive_file 7\ntotal_inactive_file 20\n"})
    assert host.available_memory() == 3520


def test_this_machine_has_both() -> None:
    assert 1 <= host.usable_cores() <= (os.cpu_count() or 1) and (host.available_memory() or 1) > 0


@pytest.mark.parametrize(
    ("ranks", "expected"), [(None, 8), ("1", 8), ("3", 2), ("8", 1), ("64", 1), ("0", 8), ("x", 8), ("", 8)]
)
def test_the_ranks_of_a_machine_share_its_cores(
    ranks: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert host.cores_per_rank() == expected
