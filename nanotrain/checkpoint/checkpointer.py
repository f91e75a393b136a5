"""Save and restore over all ranks, in phases that every rank finishes or fails together.

    save                                             restore
    1  first rank: clear leftovers of earlier        1  every rank: read the manifest, compare it with the targets,
       writers, make step-NNNNNNNN.tmp                  plan its reads
    2  every rank: write and fsync its shard         2  all ranks together: every tensor of a loaded kind is loaded
    3  first rank: check that chunks cover every     3  every rank: read its chunks, check their checksums, copy them
       tensor exactly once; manifest; rename            into the targets
    4  first rank: delete the oldest

Chunks are boxes of global tensors and the manifest has no topology, so a run with any layout reads any checkpoint.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanotrain.checkpoint import store
from nanotrain.checkpoint.all_ranks import run_on_all, run_on_first
from nanotrain.checkpoint.compatibility import check_all_loaded, check_compatible, loaded_bits
from nanotrain.checkpoint.manifest import ChunkEntry, Manifest, TensorEntry, to_json
from nanotrain.checkpoint.plan import ChunkRead, coverage_fault, plan_reads
from nanotrain.checkpoint.read import read_chunks
from nanotrain.checkpoint.write import WrittenShard, shard_name, write_shard
from nanotrain.comm.group import Group
from nanotrain.errors import CheckpointError
from nanotrain.precision.dtypes import DTYPE_NAMES
from nanotrain.topology.boxes import TensorBox

Tensors = Mapping[TensorBox, torch.Tensor]
Reads = Mapping[str, tuple[ChunkRead, ...]]


@dataclass(frozen=True)
class _ShardReport:
    """What a rank sends the first rank after its shard is on the disk."""

    shard: WrittenShard
    step: int
    objects_crc32: int


class Checkpointer:
    """Writes and reads the checkpoints of a run.

    Args:
        folder: the run's checkpoints folder; made at the first save.
        group: all ranks of the job; its first rank writes manifests and renames folders. Only Python objects are sent
            over it, so a CPU group (gloo) suffices.
        keep_last: number of complete checkpoints to keep, 0 for all.
    """

    def __init__(self, folder: Path, *, group: Group, keep_last: int = 0) -> None:
        self.folder = Path(folder)
        self.group = group
        self.keep_last = keep_last
        self._warned: set[Path] = set()  # leftovers that cannot be deleted: one warning each

    def save(
        self,
        step: int,
        tensors: Tensors,
        *,
        objects: Mapping[str, Any],
        config: Mapping[str, Any],
        topology: Mapping[str, Any],
    ) -> Path:
        """Write one checkpoint. Every rank calls this; on return the checkpoint is complete and on the disk.

        Args:
            step: optimizer steps done; names the folder.
            tensors: box -> tensor of the box's shape, to be written by this rank. The boxes of all ranks together
                cover every tensor exactly once: one replica writes.
            objects: JSON that `restore` returns, the same on all ranks.
            config: the resolved configuration, JSON.
            topology: the layout, JSON, for information only.

        Returns:
            The folder of the checkpoint.

        Raises:
            EnvironmentFault: the disk is full or the folder cannot be written. Older checkpoints are unchanged.
            CheckpointError: the ranks save different steps or objects, or their boxes do not cover the tensors exactly
                once. Nothing is committed.
        """
        try:
            temporary = run_on_first(self.group, lambda: store.start_writing(self.folder, step, warned=self._warned))
            file = shard_name(self.group.index, self.group.size)
            reports = run_on_all(
                self.group, lambda: _ShardReport(write_shard(temporary / file, tensors), step, _checksum(objects))
            )
            manifest = Manifest(step, {}, {}, objects=objects, config=config, topology=topology)
            return run_on_first(self.group, lambda: self._commit(manifest, reports))
        except Exception:
            if self.group.is_first:
                store.discard(self.folder, step)
            raise

    def restore(self, path: Path, targets: Tensors, *, config: Mapping[str, Any] | None = None) -> Manifest:
        """Read this rank's tensors from a checkpoint written with any layout. Every rank calls this.

        Args:
            path: a step folder, from `latest` or `find`.
            targets: box -> tensor of the box's shape, filled in place. For every kind of tensor loaded at all (model,
                optimizer), the ranks together load all tensors.
            config: the configuration of this run, for errors that list the model options that differ.

        Returns:
            The manifest: step, objects, config.

        Raises:
            CheckpointError: of another model, damaged, incomplete or of a newer format. The targets must not be used.
        """
        path = Path(path)
        local: list[tuple[Manifest, Reads]] = []

        def plan() -> int:
            local.append(_plan(path, targets, config=config))
            return loaded_bits(local[0][0], targets)

        bits = run_on_all(self.group, plan)
        manifest, reads = local[0]
        check_all_loaded(manifest, bits, config=config)  # same arguments on all ranks, so all raise or none
        run_on_all(self.group, lambda: read_chunks(path, reads, targets=targets))
        return manifest

    def latest(self) -> Path | None:
        """The newest complete checkpoint of this run or None, the same on every rank; warns of unusable newer ones.

        Raises:
            CheckpointError: the newest is of a newer format.
        """
        return run_on_first(self.group, lambda: store.newest_complete(self.folder))

    def find(self, path: Path) -> Path:
        """`store.find_checkpoint` on the first rank, for all.

        Raises:
            CheckpointError: there is no complete checkpoint.
        """
        return run_on_first(self.group, lambda: store.find_checkpoint(Path(path)))

    def _commit(self, manifest: Manifest, reports: Sequence[_ShardReport]) -> Path:
        first = reports[0]
        for rank, other in enumerate(reports):
            if other.step != first.step:
                raise _inconsistent(f"rank {rank} saves step {other.step}, rank 0 step {first.step}")
            if other.objects_crc32 != first.objects_crc32:
                raise _inconsistent(f"rank {rank} saves other objects than rank 0")
        manifest = replace(
            manifest,
            files={report.shard.file: report.shard.nbytes for report in reports if report.shard.nbytes},
            tensors=merge_entries([report.shard.tensors for report in reports]),
        )
        final = store.commit(self.folder, manifest.step, text=to_json(manifest))
        store.keep_newest(self.folder, self.keep_last, written=final, warned=self._warned)
        return final


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


def _inconsistent(what: str) -> CheckpointError:
    return CheckpointError(
        what,
        why="a checkpoint of such ranks could not be loaded",
        fix="resume from an older checkpoint, on nodes with the same code and configuration",
    )


def _checksum(objects: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(objects, sort_keys=True).encode())


def _plan(path: Path, targets: Tensors, *, config: Mapping[str, Any] | None) -> tuple[Manifest, Reads]:
    manifest = store.require_complete(path)
    for box, tensor in targets.items():
        assert tuple(tensor.shape) == box.box.shape, f"{box} got a tensor of {tuple(tensor.shape)}: wrong elements"
    check_compatible(manifest, {box: DTYPE_NAMES[tensor.dtype] for box, tensor in targets.items()}, config=config)
    return manifest, plan_reads(manifest, targets)
