"""A save in the background: a thread per rank writes the staged shard; that of the first rank commits after all others.

    rank k   copy to host memory; thread: write and fsync the shard -> written-0000k.json   (or the reason of a failure)
    rank 0   thread: the same -> wait for all reports -> manifest -> rename -> delete the oldest

    StagingBuffers                           the copies in host memory
    BackgroundSave                           the thread of one rank
    write_report, write_failure,             manifests of single shards, through files in the folder of the save
    wait_for_reports

The threads do not communicate over process groups, whose collectives belong to the training loop.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path

import torch

from nanotrain.checkpoint.all_ranks import storage_fault
from nanotrain.checkpoint.manifest import Manifest, from_json, to_json
from nanotrain.checkpoint.plan import split_box
from nanotrain.comm.device import synchronize
from nanotrain.quantities import ranks_text
from nanotrain.runs.files import write_text
from nanotrain.spec.boxes import TensorBox

POLL_S = 0.02, 1.0  # between two checks for reports: the first, and the longest after doubling
FAILED = "failed: "


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
        held = self._copies.get(box)
        if held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype):
            return held
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


class BackgroundSave:
    """The thread of one rank's save.

    Args:
        write: a function that writes the shard and reports it; on the first rank it also commits and returns the
            folder. Its argument returns whether the save should be given up.
    """

    def __init__(self, write: Callable[[Callable[[], bool]], Path | None]) -> None:
        self._cancelled = threading.Event()
        self._outcome: Future[Path | None] = Future()
        # not a pool, whose threads the interpreter waits for at exit
        threading.Thread(target=self._run, args=(write,), name="checkpoint-writer", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether the thread has not ended."""
        return not self._outcome.done()

    def result(self) -> Path | None:
        """Wait for the thread; returns what `write` did.

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
        """Wait at most `timeout_s` for the thread, then cancel it; returns whether it has succeeded."""
        wait([self._outcome], timeout_s)
        self._cancelled.set()
        return self._outcome.done() and self._outcome.exception() is None

    def _run(self, write: Callable[[Callable[[], bool]], Path | None]) -> None:
        try:
            self._outcome.set_result(write(self._cancelled.is_set))
        except OSError as error:
            self._outcome.set_exception(storage_fault(error))
        except BaseException as error:  # raised again by `result`, in the training loop
            self._outcome.set_exception(error)


def write_report(folder: Path, shard: Manifest, *, index: int) -> None:
    """Write the manifest of a rank's shard, atomically, after the shard is on the disk."""
    write_text(report_path(folder, index), to_json(shard))


def write_failure(folder: Path, error: Exception, *, index: int) -> None:
    """Write that a rank failed, so that the first rank does not wait for its report."""
    write_text(report_path(folder, index), FAILED + str(error)[:2000])


def wait_for_reports(folder: Path, size: int, *, timeout_s: float, is_cancelled: Callable[[], bool]) -> list[Manifest]:
    """The manifests of all shards, in the order of the ranks, as soon as each has written one; the files are removed.

    Raises:
        OSError: a rank failed to write, with its reason; or some did not finish in time.
    """
    shards: dict[int, Manifest] = {}
    deadline, pause = time.monotonic() + timeout_s, POLL_S[0]
    while True:
        for index in range(size):
            path = report_path(folder, index)
            if index not in shards and path.is_file():
                shards[index] = _read_report(path, index)
                path.unlink()
        if len(shards) == size:
            return [shards[index] for index in range(size)]
        if is_cancelled() or time.monotonic() > deadline:
            ranks = ranks_text([index for index in range(size) if index not in shards], most=8)
            raise OSError(0, f"rank {ranks} of {size} did not finish writing within {timeout_s:g} s", str(folder))
        time.sleep(pause)
        pause = min(2 * pause, POLL_S[1])


def report_path(folder: Path, index: int) -> Path:
    """The report of a rank, in the folder of an unfinished save."""
    return folder / f"written-{index:05d}.json"


def _read_report(path: Path, index: int) -> Manifest:
    text = path.read_text()
    if text.startswith(FAILED):
        raise OSError(0, f"rank {index} could not write: {text.removeprefix(FAILED)}", str(path.parent))
    return from_json(text, source=str(path), is_shard=True)
