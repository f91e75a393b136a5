"""Commit a save: merge the shards of all ranks into one manifest, and rename the folder.

merge_shards     the manifest of all ranks, which agree and cover every tensor exactly once (pure)
start_writing    make the temporary folder of a step
commit           write the manifest and rename the folder (rename_to_final), the only operation that
                 commits
set_aside_after  rename checkpoints of later steps
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from nanotrain.checkpoint.manifest import ChunkEntry, Manifest, TensorEntry
from nanotrain.checkpoint.plan import coverage_fault
from nanotrain.checkpoint.retention import deleted_name, try_to_remove
from nanotrain.checkpoint.store import leftovers, step_entries, step_folder, step_of
from nanotrain.checkpoint.stored import MANIFEST
from nanotrain.errors import CheckpointError
from nanotrain.runs.files import disk_errors, swap_names, write_text


def merge_shards(manifest: Manifest, shards: Sequence[Manifest]) -> Manifest:
    """The manifest with the files and tensors of the shards of all ranks.

    Tensors are ordered by name, chunks by rank.

    Raises:
        CheckpointError: the ranks saved different steps or objects, disagree about a tensor, or do
            not cover it exactly once.
    """
    _require_same_save(shards)
    files: dict[str, int] = {}
    not_finite: set[str] = set()
    for shard in shards:
        files.update(shard.files)
        not_finite.update(shard.not_finite or ())
    return replace(
        manifest,
        files=files,
        tensors=_merge_tensors(shards),
        not_finite=tuple(sorted(not_finite)),
    )


def _require_same_save(shards: Sequence[Manifest]) -> None:
    """Check that the shards of all ranks are of one step and have equal objects."""
    first = shards[0]
    first_objects = json.dumps(first.objects, sort_keys=True)
    for rank, shard in enumerate(shards):
        if shard.step != first.step:
            raise _inconsistent(f"rank {rank} saves step {shard.step}, rank 0 step {first.step}")
        if json.dumps(shard.objects, sort_keys=True) != first_objects:
            raise _inconsistent(f"rank {rank} saves other objects than rank 0")


def _merge_tensors(shards: Sequence[Manifest]) -> dict[str, TensorEntry]:
    """The tensors of all ranks, each with the chunks of all ranks."""
    entries: dict[str, TensorEntry] = {}  # of the first rank with the tensor
    chunks: dict[str, list[ChunkEntry]] = {}
    for rank, shard in enumerate(shards):
        for name, entry in shard.tensors.items():
            other = entries.setdefault(name, entry)
            if (other.shape, other.dtype) != (entry.shape, entry.dtype):
                raise _inconsistent(
                    f"rank {rank} saves {name} as {entry.dtype} {entry.shape}, "
                    f"others as {other.dtype} {other.shape}"
                )
            chunks.setdefault(name, []).extend(entry.chunks)
    merged = {}
    for name in sorted(chunks):
        entry = replace(entries[name], chunks=tuple(chunks[name]))
        boxes = [chunk.box for chunk in entry.chunks]
        fault = coverage_fault(entry.shape, boxes)
        if fault:
            raise _inconsistent(
                f"the ranks do not cover {name} {list(entry.shape)} exactly once: {fault}"
            )
        merged[name] = entry
    return merged


def temporary_folder(folder: Path, step: int) -> Path:
    """The folder of a save until it is committed."""
    return step_folder(folder, step).with_suffix(".tmp")


def start_writing(folder: Path, step: int) -> Path:
    """Make the temporary folder of a step, after removing leftovers of earlier writers."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in leftovers(folder):
        try_to_remove(leftover)
    temporary = temporary_folder(folder, step)
    if os.path.lexists(temporary):
        # not removed, as it holds files that nanotrain did not write: set aside
        os.rename(temporary, deleted_name(temporary))
    temporary.mkdir()
    return temporary


def commit(folder: Path, step: int, *, text: str) -> Path:
    """Write the manifest into the temporary folder and rename the folder to its final name.

    Every shard is on the disk already; each fsync precedes the rename that relies on it.
    """
    write_manifest(temporary_folder(folder, step), text)
    return rename_to_final(folder, step)


def rename_to_final(folder: Path, step: int) -> Path:
    """Rename the temporary folder, which has its manifest, to its final name."""
    temporary = temporary_folder(folder, step)
    final = step_folder(folder, step)
    if not os.path.lexists(final):
        os.rename(temporary, final)
        sync_folder(folder)
        return final
    # The same step again, after a rollback: the name must not be missing when this process is
    # killed.
    replaced = final.with_suffix(".replaced")
    if swap_names(temporary, final):
        sync_folder(folder)
        os.rename(temporary, deleted_name(final))
    else:
        try_to_remove(replaced, is_quiet=True)
        if os.path.lexists(replaced):
            os.rename(replaced, deleted_name(replaced))  # it holds files of others too
        os.rename(final, replaced)  # from here to the next line it counts under this name
        os.rename(temporary, final)
        sync_folder(folder)
    for leftover in leftovers(folder):
        if step_of(leftover) == step:
            try_to_remove(leftover, is_quiet=True)
    return final


def write_manifest(folder: Path, text: str) -> None:
    """Write the manifest of a folder whose shards are on the disk, and fsync both."""
    write_text(folder / MANIFEST, text)
    sync_folder(folder)


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints of later steps, which a run that resumes at `step` does not continue.

    Otherwise a crash before the run has reached those steps would resume from them.

    Raises:
        EnvironmentFault: the folder cannot be written.
    """
    aside = []
    for path in step_entries(folder):
        if step_of(path) <= step:
            continue
        names = (path.with_suffix(f".superseded-{number}") for number in count(1))
        target = next(name for name in names if not os.path.lexists(name))
        with disk_errors(path, fix="choose another folder with --run-dir"):
            os.rename(path, target)
        aside.append(target)
    return aside


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that its file names survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _inconsistent(what: str) -> CheckpointError:
    return CheckpointError(
        what,
        why="a checkpoint of such ranks could not be loaded",
        fix="resume from an older checkpoint, on nodes with the same code and configuration",
    )
