"""A save in the background: a thread per rank writes the staged shard; the first rank commits.

    rank k   copy to host memory; thread: write and fsync the shard -> written-0000k.json, or the
             reason of a failure
    rank 0   thread: the same -> wait for all reports -> manifest -> rename -> delete the oldest

    StagingBuffers                           the copies in host memory
    BackgroundSave                           the thread of one rank
    cancel_all                               before this process opens the run once more
    write_report, write_failure,             manifests of single shards, through files in the folder
    wait_for_reports, merge_reports          of the save
    merge_apart                              merges many of them in a separate process

The threads do not communicate over process groups, whose collectives belong to the training loop.
"""

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path

import torch

from nanotrain.checkpoint.all_ranks import storage_fault
from nanotrain.checkpoint.commit import merge_shards, write_manifest
from nanotrain.checkpoint.manifest import Manifest, from_json, to_json
from nanotrain.checkpoint.plan import split_box
from nanotrain.comm.device import synchronize
from nanotrain.quantities import ranks_text
from nanotrain.runs.files import write_text
from nanotrain.spec.boxes import TensorBox
from nanotrain.system import OF_TORCHRUN, end_with_launcher

POLL_S = 0.02, 1.0  # between two checks for reports: the first, and the longest after doubling
FAILED = "failed: "
# bytes of reports; a process takes as long to start as a thread takes to merge them
MAX_IN_THREAD = 4_000_000


class StagingBuffers:
    """Host copies of the tensors that a rank saves."""

    def __init__(self) -> None:
        self._copies: dict[TensorBox, torch.Tensor] = {}

    def copy(self, tensors: Mapping[TensorBox, torch.Tensor]) -> dict[TensorBox, torch.Tensor]:
        """Copy tensors to the host; complete on return, valid until the next call.

        Args:
            tensors: box -> tensor of the box's shape, on any device.

        Returns:
            box -> contiguous tensor in host memory.
        """
        copies = {box: self._copy_of(box, tensor) for box, tensor in tensors.items()}
        for box, tensor in tensors.items():
            for chunk in split_box(box.box, tensor.element_size()):
                index = chunk.within(box.box).slices()
                copies[box][index].copy_(tensor.detach()[index], non_blocking=True)
        for device in {tensor.device for tensor in tensors.values()}:
            synchronize(device)
        self._copies = copies  # releases the memory of tensors that are not saved any more
        return copies

    def _copy_of(self, box: TensorBox, tensor: torch.Tensor) -> torch.Tensor:
        """A host buffer for a tensor, reused from the last save if the shape is the same."""
        held = self._copies.get(box)
        if held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype):
            return held
        return torch.empty(
            tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
        )


class BackgroundSave:
    """The thread of one rank's save.

    Args:
        write: a function that writes the shard and reports it; on the first rank it also commits
            and returns the folder. Its argument returns whether the save should be given up.
    """

    def __init__(self, write: Callable[[Callable[[], bool]], Path | None]) -> None:
        self._cancelled = threading.Event()
        self._outcome: Future[Path | None] = Future()
        _running.add(self)
        # not a pool, whose threads the interpreter waits for at exit
        threading.Thread(
            target=self._run, args=(write,), name="checkpoint-writer", daemon=True
        ).start()

    @property
    def is_running(self) -> bool:
        """Whether the thread has not ended."""
        return not self._outcome.done()

    def result(self) -> Path | None:
        """Wait for the thread; returns the result of `write`.

        Raises:
            StorageFault: the disk failed.
            Exception: any other error of `write`.
        """
        return self._outcome.result()

    def cancel(self) -> None:
        """Cancel the save and wait for the thread, which may be writing."""
        self._cancelled.set()
        wait([self._outcome])

    def give_up(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the thread, then cancel it; returns whether it has
        succeeded.
        """
        try:
            wait([self._outcome], timeout_s)
        finally:  # the wait may be interrupted by an exception
            self._cancelled.set()
        return self._outcome.done() and self._outcome.exception() is None

    def _run(self, write: Callable[[Callable[[], bool]], Path | None]) -> None:
        """Run the save; its result or its error is raised again by `result`."""
        try:
            self._outcome.set_result(write(self._cancelled.is_set))
        except OSError as error:
            self._outcome.set_exception(storage_fault(error))
        except BaseException as error:  # raised again by `result`, in the training loop
            self._outcome.set_exception(error)
        finally:
            _running.discard(self)


# saves of this process; the next save of a step writes into the same folder
_running: set[BackgroundSave] = set()


def cancel_all() -> None:
    """Cancel the saves of this process and wait for their threads, which may be writing."""
    for save in [*_running]:
        save.cancel()


def write_report(folder: Path, shard: Manifest, *, index: int) -> None:
    """Write the manifest of a rank's shard, atomically, after the shard is on the disk."""
    write_text(report_path(folder, index), to_json(shard))


def write_failure(folder: Path, error: Exception, *, index: int) -> None:
    """Write that a rank failed, so that the first rank does not wait for its report."""
    write_text(report_path(folder, index), FAILED + str(error)[:2000])


def wait_for_reports(
    folder: Path, size: int, *, timeout_s: float, is_cancelled: Callable[[], bool]
) -> int:
    """Wait until each rank has written its report; returns the bytes of all.

    Raises:
        OSError: a rank failed to write, with its reason; or some did not finish in time.
    """
    names = {report_path(folder, index).name: index for index in range(size)}
    sizes: dict[str, int] = {}
    deadline = time.monotonic() + timeout_s
    pause, longest_pause = POLL_S
    while True:
        # one listing for all, as a look for each of thousands would take the time of the training
        # step
        for entry in os.scandir(folder):
            if entry.name in names and entry.name not in sizes:
                _require_success(Path(entry), names[entry.name])
                sizes[entry.name] = entry.stat().st_size
        if len(sizes) == size:
            return sum(sizes.values())
        if is_cancelled() or time.monotonic() > deadline:
            missing = [index for name, index in names.items() if name not in sizes]
            ranks = ranks_text(missing, most=8)
            what = f"rank {ranks} of {size} did not finish writing within {timeout_s:g} s"
            raise OSError(0, what, str(folder))
        time.sleep(pause)
        pause = min(2 * pause, longest_pause)


def merge_reports(folder: Path, size: int, *, manifest: Manifest) -> None:
    """Write the manifest of all shards in the order of the ranks, all of which have written their
    reports.

    The reports are removed.

    Raises:
        CheckpointError: the ranks do not agree, as of `merge_shards`.
    """
    paths = [report_path(folder, index) for index in range(size)]
    shards = [from_json(path.read_text(), source=str(path), is_shard=True) for path in paths]
    write_manifest(folder, to_json(merge_shards(manifest, shards)))
    for path in paths:
        path.unlink()


def merge_apart(
    folder: Path, size: int, *, manifest: Manifest, is_cancelled: Callable[[], bool]
) -> None:
    """`merge_reports` in a new process: a thread would hold up the training step, which needs the
    same interpreter.

    Measured for 16,384 ranks: 134 MB of reports are 50 s of processor time.

    Raises:
        OSError: the process did not end by itself, or the save was cancelled.
    """
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from nanotrain.checkpoint.background import run_merge; run_merge()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        with process.stdin as pipe:
            pickle.dump((folder, size, manifest), pipe)
        while process.poll() is None and not is_cancelled():
            time.sleep(POLL_S[0])
        process.kill()
        reply = process.stdout.read()
    if not reply:
        raise OSError(
            0, f"the merge of {size} reports ended with code {process.returncode}", str(folder)
        )
    error: Exception | None = pickle.loads(reply)
    if error is not None:
        raise error


def run_merge() -> None:
    """The process of `merge_apart`: reads its arguments, and writes the error or None."""
    # no process writes into the folder of a save whose rank has ended
    end_with_launcher({OF_TORCHRUN: ""})
    folder, size, manifest = pickle.loads(sys.stdin.buffer.read())
    error: Exception | None = None
    try:
        merge_reports(folder, size, manifest=manifest)
    except Exception as raised:
        error = raised
    pickle.dump(error, sys.stdout.buffer)


def report_path(folder: Path, index: int) -> Path:
    """The report of a rank, in the folder of an unfinished save."""
    return folder / f"written-{index:05d}.json"


def _require_success(path: Path, index: int) -> None:
    with path.open() as file:
        if file.read(len(FAILED)) == FAILED:
            raise OSError(0, f"rank {index} could not write: {file.read()}", str(path.parent))
