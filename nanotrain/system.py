"""A process from its first line to its exit code, and what of its host it may use.

run_program                a program as all that a process does
describe_exit              how another process ended, for an error
outlive_output             a training goes on without its output, also after its terminal was closed
end_with_launcher          a rank does not outlive torchrun
stop_signals               that save and end a run, `handling_signals` in a block
require_folders            at the start of a command
importing_torch            during `import torch`, which saves 0.4 s and more
without_collection         while many objects are made
end_without_collection     at the end of the process
keep_freed_memory          for the next step of a training on CPUs
usable_cores, cores_per_rank, available_memory
                           of this machine; in a container those of its limits
package_version            of an installed package

The limits are files of the process's control group and of every group above it (Linux kernel
documentation: "Control Group v2", and "CFS Bandwidth Control" and "Memory Resource Controller" for
version 1).
"""

import ctypes
import gc
import io
import math
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from nanotrain.errors import EnvironmentFault, NanotrainError, report

PR_SET_PDEATHSIG = 1  # see man 2 prctl
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # see man 3 mallopt; in bytes
# set by a launcher that was stopped: the exit code of ranks that torch starts again
STOPPED = "NANOTRAIN_STOPPED"
# set for ranks; a process that a user started from a shell outlives it (nohup)
OF_TORCHRUN = "TORCHELASTIC_RUN_ID"


# what usually sends a signal that nobody of this program sends
SENDERS = {
    signal.SIGKILL: "the kernel sends it where memory runs out: see dmesg",
    signal.SIGBUS: "a full /dev/shm is the usual cause",
}


def describe_exit(code: int) -> str:
    """How a process ended, from its exit code; a negative one is a signal.

    >>> describe_exit(-11), describe_exit(3)
    ('SIGSEGV ended it', 'it ended with exit code 3; its own message is above')
    """
    if code >= 0:
        return f"it ended with exit code {code}; its own message is above"
    number = -code
    if number not in set(signal.Signals):  # a real-time signal
        return f"signal {number} ended it"
    sent = signal.Signals(number)
    cause = f" ({SENDERS[sent]})" if sent in SENDERS else ""
    return f"{sent.name} ended it{cause}"


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run `main` as all that this process does, and exit with the code that it returns.

    After an error one of several ranks ends at once: the interpreter's own end destroys process
    groups, which waits for peers that may be inside a collective.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a text may have characters that the encoding does not have
        sys.stdout.reconfigure(errors="backslashreplace")
    # it would end this process before the training handles it
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    end_with_launcher(os.environ)
    if STOPPED in os.environ:
        sys.exit(int(os.environ[STOPPED]))
    try:
        code = main()
        print(end="", flush=True)  # a closed pipe is found here, not when the interpreter ends
    except SystemExit:
        raise
    except BrokenPipeError:  # the reader of the pipe has closed it, as `| head` does
        # takes what the interpreter flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except NanotrainError as error:
        code = report(error)
    except BaseException:
        traceback.print_exc()
        code = 1
    if code and os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    end_without_collection()
    sys.exit(code)


def end_with_launcher(environment: Mapping[str, str]) -> None:
    """End this process with SIGKILL when torchrun, which started it, ends.

    No rank may continue to write.

    The kernel sends the signal (Linux). Checkpoints are committed by a rename, so it loses no
    complete one.

    Args:
        environment: environment of this process.
    """
    if OF_TORCHRUN in environment and sys.platform == "linux":
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it ended before the request
            os.kill(os.getpid(), signal.SIGKILL)


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under `nohup`.

    A closed terminal sends SIGHUP.
    """
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up)


@contextmanager
def handling_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` for `stop_signals` and SIGUSR1 (save and continue) while the block runs."""
    numbers = (*stop_signals(), signal.SIGUSR1)
    before = {
        number: signal.signal(number, lambda number, _frame: handle(number)) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def require_folders() -> None:
    """Check that temporary files can be made, and that the working folder exists.

    torch and the start of processes require the first; without the second, torch's first product of
    matrices ends the process.

    Raises:
        EnvironmentFault: no folder for temporary files can be written, or the working folder was
            deleted.
    """
    try:
        os.getcwd()
        tempfile.gettempdir()
    except OSError as error:
        what = "there is no working folder, or no folder for temporary files"
        fix = (
            "enter a folder that exists (cd), and name one for temporary files that can be "
            "written with TMPDIR"
        )
        raise EnvironmentFault(what, why=str(error.strerror), fix=fix) from None


@contextmanager
def importing_torch() -> Iterator[None]:
    """Import in the block without garbage collection, unless torch is imported already.

    Torch and what is built on it are half a million objects of which none is garbage. Collections
    visit all of them repeatedly: a third of the CPU time of `import torch`. What was imported is
    then left out of later collections.

    Raises:
        EnvironmentFault: as `require_folders`.
    """
    if "torch" in sys.modules:
        yield
        return
    require_folders()
    with without_collection():
        try:
            yield
        finally:
            gc.freeze()


@contextmanager
def without_collection() -> Iterator[None]:
    """Make many objects in the block, or in the decorated function, of which none is garbage.

    Collections visit all of them repeatedly: a manifest of 16,384 chunks was parsed in 0.54 s and
    received in 0.26 s, without collections in 0.33 s and 0.05 s (measured).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def end_without_collection() -> None:
    """Disable the garbage collection at exit; called last in a process.

    That collection visits all objects (0.4 s of CPU). A process that has imported Triton keeps it,
    since Triton's bindings print every object that is not collected as a leak: 25 lines (3.9).
    """
    if "triton" in sys.modules:
        gc.unfreeze()
        return
    gc.disable()
    gc.freeze()


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks for later allocations, for the rest of the process.

    A training step on a CPU frees and allocates the same activations as the step before, and the
    system would clear every page of them again: 5 to 8 % of a step (25m in bf16, two processes).
    The peak memory of the process does not change. Variables of the environment that set glibc's
    allocator are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None and not any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ
    ):
        # older releases refuse the first
        mallopt(M_MMAP_THRESHOLD, 2**30) or mallopt(M_MMAP_THRESHOLD, 2**25)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


class _Output(io.FileIO):
    """A stream of a training that drops output that cannot be written.

    A note on standard error tells the first time.
    """

    note = ""

    def write(self, data: Any) -> int:
        """Write bytes, and return how many are done with."""
        try:
            return super().write(data) or 0  # none yet where a full pipe does not block
        except OSError as error:
            note, self.note = self.note, ""
            if note:
                print(
                    f"standard output cannot be written: {error.strerror}; {note}", file=sys.stderr
                )
            return len(data)


def outlive_output(note: str) -> None:
    """Ignore write errors of standard output and error from now on, as of a closed pipe.

    The first time, `note` is printed on standard error.

    Streams that are not the process's own, as in a notebook, are left as they are.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            raw = _Output(stream.fileno(), "w", closefd=False)
            raw.note = note if name == "stdout" else ""
            buffer = io.BufferedWriter(raw)
            text = io.TextIOWrapper(
                buffer, encoding=stream.encoding, errors="backslashreplace", line_buffering=True
            )
            setattr(sys, name, text)


PROC, CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
OPEN_FILES, OPEN_FILES_PER_RANK = 64, 4
OPEN_FILES_OF_WORKERS, OPEN_FILES_PER_WORKER = 32, 12


def usable_cores() -> int:
    """Cores that this process may keep busy; at least 1."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(cores, core_limit() or cores)


def cores_per_rank(num_ranks: int | None = None) -> int:
    """The cores of this process per rank of the machine; at least 1.

    The number of ranks is torchrun's LOCAL_WORLD_SIZE.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, usable_cores() // (num_ranks or (int(ranks) if ranks.isdecimal() else 1) or 1))


@cache
def core_limit() -> int | None:
    """Cores of the control group (`docker run --cpus`), rounded up; None without a limit."""
    limits = []
    for group in _groups("cpu"):
        numbers = _read(group / "cpu.max").split() or [
            _read(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        ]
        # not "max" (version 2), -1 (1) or a missing file
        if all(number.strip().isdecimal() for number in numbers):
            quota, period = map(int, numbers)
            limits.append(max(1, math.ceil(quota / period)))
    return min(limits, default=None)


def available_memory() -> int | None:
    """Bytes of memory that the process can still get; None if unknown.

    The limits are those of the machine and of its control group.
    """
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
    """The folders of the process's control group and its parents.

    Some may not exist in a container.
    """
    for line in _read(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # version 2 has one tree for all
        root = CONTROL_GROUPS / controller if controllers else CONTROL_GROUPS
        folder = root / path.lstrip("/")
        yield from (folder, *folder.parents[: len(folder.parts) - len(root.parts)])


def _sizes(file: Path, name: str) -> list[int]:
    """The number behind a name in a file of one name and number per line; empty without it."""
    lines = (line.split() for line in _read(file).splitlines())
    return [int(words[1]) for words in lines if len(words) > 1 and words[0] == name]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def require_open_files(*, num_ranks: int = 0, num_workers: int = 0) -> None:
    """Check that this process may open the files and sockets that it needs at the same time.

    Measured: 25 + 3 per rank in the process that starts them, 33 in one of four ranks, and with two
    data workers (four) between 104 and 120 (120 and 150). With less, one rank can fail where the
    others wait for it.

    Args:
        num_ranks: number of ranks that this process starts.
        num_workers: number of data workers of this process.

    Raises:
        EnvironmentFault: the limit is lower.
    """
    needed = OPEN_FILES + OPEN_FILES_PER_RANK * num_ranks
    if num_workers:
        needed += OPEN_FILES_OF_WORKERS + OPEN_FILES_PER_WORKER * num_workers
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise EnvironmentFault(
            f"a process may open {limit} files",
            why=f"it needs {needed}, as many as its ranks and data workers take",
            fix="raise the limit with ulimit -n 1024 (docker run --ulimit nofile=1024)",
        )


@cache
def package_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    from importlib import metadata  # its parsers are no part of a quick command

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
