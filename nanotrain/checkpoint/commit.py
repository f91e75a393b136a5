"""Merge the reports of the ranks into one manifest.

ShardReport        the written shard of a rank, and its step and objects, which must agree
merge_reports      the manifest of all ranks, which agree and cover every tensor exactly once
write_report,      the same through files in the folder of a save, for writers that must not communicate
wait_for_reports
"""

import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanotrain.checkpoint.all_ranks import StorageFault
from nanotrain.checkpoint.manifest import ChunkEntry, Manifest, TensorEntry, tensor_from_dict, tensor_to_dict
from nanotrain.checkpoint.plan import coverage_fault
from nanotrain.checkpoint.write import WrittenShard
from nanotrain.errors import CheckpointError, EnvironmentFault
from nanotrain.runs.files import write_bytes
from nanotrain.untrusted import object_of, parse_json, text_of, whole_number

POLL_S = 0.02, 1.0  # between two checks for reports: the first, and the longest after doubling


@dataclass(frozen=True)
class ShardReport:
    """The written shard of a rank, and values that must be equal on all ranks."""

    shard: WrittenShard
    step: int
    objects_crc32: int


def report_of(shard: WrittenShard, manifest: Manifest) -> ShardReport:
    """The report of a written shard of the checkpoint that `manifest` describes without tensors."""
    return ShardReport(shard, manifest.step, zlib.crc32(json.dumps(manifest.objects, sort_keys=True).encode()))


def merge_reports(manifest: Manifest, reports: Sequence[ShardReport]) -> Manifest:
    """The manifest with the tensors and files of all ranks.

    Raises:
        CheckpointError: the ranks saved different steps or objects, or do not cover the tensors exactly once.
    """
    first = reports[0]
    for rank, other in enumerate(reports):
        if other.step != first.step:
            raise _inconsistent(f"rank {rank} saves step {other.step}, rank 0 step {first.step}")
        if other.objects_crc32 != first.objects_crc32:
            raise _inconsistent(f"rank {rank} saves other objects than rank 0")
    return replace(
        manifest,
        files={report.shard.file: report.shard.nbytes for report in reports if report.shard.nbytes},
        tensors=merge_entries([report.shard.tensors for report in reports]),
    )


def merge_entries(shards: Sequence[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Merge the entries of all ranks, sorted by name, with chunks in the order of the ranks.

    Raises:
        CheckpointError: ranks disagree about a tensor, or their chunks do not cover it exactly once.
    """
    chunks: dict[str, list[ChunkEntry]] = {}
    first: dict[str, TensorEntry] = {}
    for rank, tensors in enumerate(shards):
        for name, entry in tensors.items():
            other = first.setdefault(name, entry)
            if (other.shape, other.dtype) != (entry.shape, entry.dtype):
                raise _inconsistent(
                    f"rank {rank} saves {name} as {entry.dtype} {entry.shape}, others as {other.dtype} {other.shape}"
                )
            chunks.setdefault(name, []).extend(entry.chunks)
    for name, entry in first.items():
        fault = coverage_fault(entry.shape, [chunk.box for chunk in chunks[name]])
        if fault is not None:
            raise _inconsistent(f"the ranks do not cover {name} {list(entry.shape)} exactly once: {fault}")
    return {name: TensorEntry(first[name].shape, first[name].dtype, tuple(chunks[name])) for name in sorted(first)}


def write_report(folder: Path, report: ShardReport, *, index: int) -> None:
    """Write the report of a rank, atomically, after its shard is on the disk."""
    shard = report.shard
    body = {
        "step": report.step,
        "objects_crc32": report.objects_crc32,
        "file": shard.file,
        "nbytes": shard.nbytes,
        "tensors": {name: tensor_to_dict(entry) for name, entry in shard.tensors.items()},
    }
    _write(report_path(folder, index), body)


def write_failure(folder: Path, error: Exception, *, index: int) -> None:
    """Write that a rank failed, so that the first rank does not wait for its report."""
    _write(report_path(folder, index), {"error": str(error)[:2000]})


def wait_for_reports(
    folder: Path, size: int, *, timeout_s: float, is_cancelled: Callable[[], bool]
) -> list[ShardReport]:
    """The reports of all ranks, in their order, as soon as each has written one; the files are removed.

    Raises:
        OSError: a rank failed to write, with its reason; or some did not finish in time.
    """
    reports: dict[int, ShardReport] = {}
    deadline, pause = time.monotonic() + timeout_s, POLL_S[0]
    while len(reports) < size:
        for index in range(size):
            path = report_path(folder, index)
            if index not in reports and path.is_file():
                reports[index] = _read_report(path, index)
                path.unlink()
        if len(reports) == size:
            break
        if is_cancelled() or time.monotonic() > deadline:
            missing = ", ".join(str(index) for index in range(size) if index not in reports)
            raise OSError(0, f"rank {missing} of {size} did not finish writing within {timeout_s:g} s", str(folder))
        time.sleep(pause)
        pause = min(2 * pause, POLL_S[1])
    return [reports[index] for index in range(size)]


def report_path(folder: Path, index: int) -> Path:
    """The report of a rank, in the folder of an unfinished save."""
    return folder / f"written-{index:05d}.json"


def _write(path: Path, body: Mapping[str, Any]) -> None:
    """Write a report; if that fails the save fails, and training continues."""
    try:
        write_bytes(path, json.dumps(body).encode())
    except EnvironmentFault as error:
        raise StorageFault(error.what, why=error.why, fix=error.fix) from None


def _read_report(path: Path, index: int) -> ShardReport:
    body = object_of(parse_json(path.read_bytes()), path.name)
    if "error" in body:
        raise OSError(0, f"rank {index} could not write: {text_of(body['error'], 'error')}", str(path.parent))
    tensors = {name: tensor_from_dict(entry, name) for name, entry in object_of(body["tensors"], "tensors").items()}
    shard = WrittenShard(text_of(body["file"], "file"), whole_number(body["nbytes"], "nbytes"), tensors)
    return ShardReport(shard, whole_number(body["step"], "step"), whole_number(body["objects_crc32"], "objects_crc32"))


def _inconsistent(what: str) -> CheckpointError:
    return CheckpointError(
        what,
        why="a checkpoint of such ranks could not be loaded",
        fix="resume from an older checkpoint, on nodes with the same code and configuration",
    )
