"""Commit a save: the shards of all ranks become one manifest, and a rename makes the folder a
checkpoint.

merge_shards     the manifest of all ranks, which agree and cover every tensor exactly once (pure)
start_writing    make the temporary folder of a step
commit           write the manifest and rename the folder (rename_to_final), the only operation that commits
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
    """The manifest with the files and tensors of the shards of all ranks: tensors by name, chunks
    by rank.

    Raises:
        CheckpointError: the ranks saved different steps or objects, disagree about a tensor, or do
            not cover it exactly once.
    """
    first, objects = shards[0], [json.dumps(shard.objects, sort_keys=True) for shard in shards]
    for rank, shard in enumerate(shards):
        if shard.step != first.step:
            raise _inconsistent(f"rank {rank} saves step {shard.step}, rank 0 step {first.step}")
        if objects[rank] != objects[0]:
            raise _inconsistent(f"rank {rank} saves other objects than rank 0")
    files = {name: nbytes for shard in shards for name, nbytes in shard.files.items()}
    first_entries: dict[str, TensorEntry] = {}
    chunks: dict[str, list[ChunkEntry]] = {}
    for rank, shard in enumerate(shards):
        for name, entry in shard.tensors.items():
            other = first_entries.setdefault(name, entry)
            if (other.shape, other.dtype) != (entry.shape, entry.dtype):
                raise _inconsistent(
                    f"rank {rank} saves {name} as {entry.dtype} {entry.shape}, others as {other.dtype} {other.shape}"
                )
            chunks.setdefault(name, []).extend(entry.chunks)
    tensors = {
        name: replace(first_entries[name], chunks=tuple(chunks[name])) for name in sorted(chunks)
    }
    for name, entry in tensors.items():
        if fault := coverage_fault(entry.shape, [chunk.box for chunk in entry.chunks]):
            raise _inconsistent(
                f"the ranks do not cover {name} {list(entry.shape)} exactly once: {fault}"
            )
    not_finite = {name for shard in shards for name in shard.not_finite or ()}
    return replace(manifest, files=files, tensors=tensors, not_finite=tuple(sorted(not_finite)))


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
        os.rename(temporary, deleted_name(temporary))  # it holds files of others, which stay
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
    temporary, final = temporary_folder(folder, step), step_folder(folder, step)
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
    """Rename the checkpoints of later steps, of which a run that resumes at `step` is not a
    continuation.

    Otherwise a crash before the run has reached those steps would resume from them.

    Raises:
        EnvironmentFault: the folder cannot be written.
    """
    aside = []
    for path in [path for path in step_entries(folder) if step_of(path) > step]:
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
