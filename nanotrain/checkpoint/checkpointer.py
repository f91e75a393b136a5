"""Saving and loading over all ranks: the phases, each ended by a vote, so that all ranks finish or fail alike.

    save                                             restore
    1  first rank clears old leftovers, makes        1  every rank reads the manifest, checks that the model fits
       step-NNNNNNNN.tmp                                and plans its reads
    2  every rank writes and fsyncs its shard        2  together they must want every tensor of a wanted kind
    3  first rank: the pieces tile every tensor      3  every rank reads its pieces, checks their checksums and
       exactly once, manifest, rename = complete        fills its tensors in place
    4  first rank deletes the oldest

Boxes are what travels: a checkpoint has no topology, so any layout reads what any other wrote.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanotrain.checkpoint import store
from nanotrain.checkpoint.agree import on_first, together
from nanotrain.checkpoint.fits import check_fits, check_used, used_mask
from nanotrain.checkpoint.manifest import Manifest, PieceEntry, TensorEntry, to_json
from nanotrain.checkpoint.plan import PieceRead, plan_reads, tiling_fault
from nanotrain.checkpoint.read import fill
from nanotrain.checkpoint.write import DTYPE_NAMES, Shard, shard_name, write_shard
from nanotrain.comm.group import Group
from nanotrain.topology.boxes import TensorBox

Tensors = Mapping[TensorBox, torch.Tensor]


@dataclass(frozen=True)
class _Said:
    """What a rank tells the others once its shard is on the disk."""

    shard: Shard
    step: int
    objects_crc32: int


@dataclass(frozen=True)
class _Planned:
    """What a rank knows before it reads."""

    manifest: Manifest
    reads: dict[str, tuple[PieceRead, ...]]
    mask: int


class Checkpointer:
    """Writes and reads the checkpoints of a run.

    Args:
        folder: the run's checkpoints folder; made at the first save.
        group: all ranks of the job; its first rank writes manifests and moves folders. Objects travel over it, so a
            group on the CPU (gloo) is the natural one.
        keep_last: complete checkpoints to keep, 0 for all.
    """

    def __init__(self, folder: Path, *, group: Group, keep_last: int = 0) -> None:
        self.folder = Path(folder)
        self.group = group
        self.keep_last = keep_last

    def save(
        self,
        step: int,
        tensors: Tensors,
        *,
        objects: Mapping[str, Any],
        config: Mapping[str, Any],
        topology: Mapping[str, Any],
    ) -> Path:
        """Write one checkpoint; every rank calls this, and when it returns the checkpoint is complete and on the disk.

        Args:
            step: optimizer steps done; names the folder.
            tensors: what this rank writes, box -> tensor of the box's shape. The boxes of all ranks together tile
                every tensor exactly once: of replicas one writes.
            objects: JSON given back by `restore`, the same on all ranks.
            config: the resolved configuration, JSON.
            topology: the layout, JSON, for information only.

        Returns:
            The folder of the checkpoint.

        Raises:
            EnvironmentFault: the disk is full or the folder cannot be written; on every rank, and older checkpoints
                are as they were.
            AssertionError: the boxes do not tile the tensors; on every rank, before anything is committed.
        """
        try:
            temporary = on_first(self.group, lambda: store.start_writing(self.folder, step))
            file = shard_name(self.group.index, self.group.size)
            said = together(
                self.group,
                lambda: _Said(write_shard(temporary / file, tensors), step, _checksum(objects)),
            )
            return on_first(self.group, lambda: self._commit(said, objects=objects, config=config, topology=topology))
        except Exception:
            if self.group.is_first:
                store.discard(self.folder, step)
            raise

    def restore(self, path: Path, wanted: Tensors, *, config: Mapping[str, Any] | None = None) -> Manifest:
        """Fill this rank's tensors from a checkpoint written in any layout; every rank calls this.

        Args:
            path: a step folder, as `latest` or `find` give it.
            wanted: box -> tensor of the box's shape, filled in place. Of every kind of tensor wanted at all (model,
                optimizer) the ranks together want all.
            config: the present configuration; makes the error for another model say which options differ.

        Returns:
            The manifest: step, objects, config.

        Raises:
            CheckpointError: another model, damaged, incomplete or of a newer format; on every rank. The wanted tensors
                must not be used then.
        """
        path = Path(path)
        own: list[_Planned] = []

        def plan() -> int:
            own.append(_plan(path, wanted, config=config))
            return own[0].mask

        masks = together(self.group, plan)
        planned = own[0]
        check_used(planned.manifest, masks, config=config)  # a function of what all ranks know, so all fail alike
        together(self.group, lambda: fill(path, planned.reads, wanted=wanted))
        return planned.manifest

    def latest(self) -> Path | None:
        """The newest complete checkpoint of this run, or None, the same on every rank; half-written ones are warned of.

        Raises:
            CheckpointError: the newest is of a newer format.
        """
        return on_first(self.group, lambda: store.newest_complete(self.folder))

    def find(self, path: Path) -> Path:
        """`store.find_checkpoint` by the first rank for all.

        Raises:
            CheckpointError: nothing there that is complete.
        """
        return on_first(self.group, lambda: store.find_checkpoint(Path(path)))

    def _commit(
        self,
        said: Sequence[_Said],
        *,
        objects: Mapping[str, Any],
        config: Mapping[str, Any],
        topology: Mapping[str, Any],
    ) -> Path:
        first = said[0]
        for rank, other in enumerate(said):
            assert other.step == first.step, (
                f"rank {rank} saves step {other.step}, rank 0 step {first.step}: a mixed state"
            )
            assert other.objects_crc32 == first.objects_crc32, (
                f"rank {rank} saves other objects than rank 0: one would be lost"
            )
        manifest = Manifest(
            step=first.step,
            files={one.shard.file: one.shard.nbytes for one in said if one.shard.nbytes},
            tensors=merge_entries([one.shard.tensors for one in said]),
            objects=objects,
            config=config,
            topology=topology,
        )
        final = store.commit(self.folder, first.step, text=to_json(manifest))
        store.keep_newest(self.folder, self.keep_last, written=final)
        return final


def merge_entries(shards: Sequence[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Every rank's entries as one, sorted by name, pieces in the order of the ranks.

    Raises:
        AssertionError: ranks disagree about a tensor, or their pieces do not tile it exactly once.
    """
    pieces: dict[str, list[PieceEntry]] = {}
    first: dict[str, TensorEntry] = {}
    for rank, tensors in enumerate(shards):
        for name, entry in tensors.items():
            known = first.setdefault(name, entry)
            same = (known.shape, known.dtype) == (entry.shape, entry.dtype)
            assert same, (
                f"rank {rank} holds {name} as {entry.dtype} {entry.shape}, others as {known.dtype} {known.shape}"
            )
            pieces.setdefault(name, []).extend(entry.pieces)
    for name, entry in first.items():
        fault = tiling_fault(entry.shape, [piece.box for piece in pieces[name]])
        assert fault is None, (
            f"the ranks do not tile {name} {list(entry.shape)}: {fault}; the checkpoint would be unreadable"
        )
    return {name: TensorEntry(first[name].shape, first[name].dtype, tuple(pieces[name])) for name in sorted(first)}


def _checksum(objects: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(objects, sort_keys=True).encode())


def _plan(path: Path, wanted: Tensors, *, config: Mapping[str, Any] | None) -> _Planned:
    manifest = store.require_complete(path)
    for box, tensor in wanted.items():
        assert tuple(tensor.shape) == box.box.shape, (
            f"{box} got a tensor of {tuple(tensor.shape)}: elements would be misplaced"
        )
    check_fits(manifest, {box: DTYPE_NAMES[tensor.dtype] for box, tensor in wanted.items()}, config=config)
    return _Planned(manifest, plan_reads(manifest, wanted), used_mask(manifest, wanted))
