"""Save and restore over all ranks, in phases that every rank finishes or fails together.

    save
    1  first rank: clear leftovers, make step-NNNNNNNN.tmp, check the free space
    2  every rank: write and fsync its shard
    3  first rank: check that chunks cover every tensor exactly once; manifest; rename
    4  first rank: delete the oldest

    restore
    1  first rank: read and check the manifest, for all
    2  every rank: compare it with the targets, plan its reads, read its chunks, check their
       checksums, copy them into the targets; together they load every tensor of a kind

`start_save` copies the tensors to host memory and leaves 2 to 4 to a thread per rank
(background.py). Chunks are boxes of global tensors and the manifest has no topology, so a run with
any layout reads any checkpoint.
"""

import errno
import os
import pickle
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import torch

from nanotrain.checkpoint import commit, store
from nanotrain.checkpoint.all_ranks import reduce_on_all, run_on_all, run_on_first, storage_fault
from nanotrain.checkpoint.background import (
    MAX_IN_THREAD,
    BackgroundSave,
    StagingBuffers,
    merge_apart,
    merge_reports,
    wait_for_reports,
    write_failure,
    write_report,
)
from nanotrain.checkpoint.compatibility import (
    check_all_loaded,
    check_compatible,
    fit_padding,
    loads,
)
from nanotrain.checkpoint.manifest import Manifest, plain_json, to_json
from nanotrain.checkpoint.plan import plan_reads
from nanotrain.checkpoint.read import Source, read_chunks
from nanotrain.checkpoint.retention import keep_newest, try_to_remove
from nanotrain.checkpoint.write import shard_name, write_shard
from nanotrain.comm.group import Group
from nanotrain.comm.work import CommunicationFault
from nanotrain.errors import StorageFault
from nanotrain.precision.dtypes import DTYPE_NAMES
from nanotrain.spec.boxes import TensorBox
from nanotrain.system import without_collection

Tensors = Mapping[TensorBox, torch.Tensor]
TargetFilter = Callable[[Manifest, Tensors], Tensors]


class Content(TypedDict):
    """The fields of a manifest that a run sets."""

    objects: Mapping[str, Any]  # JSON that `restore` returns
    config: Mapping[str, Any]  # the resolved configuration
    topology: Mapping[str, Any]  # the layout, for information only


class StartedSave(NamedTuple):
    """A save in the background on one rank."""

    temporary: Path
    tensors: Tensors  # in host memory
    manifest: Manifest  # without tensors and files
    prunes: bool


class Checkpointer:
    """Writes and reads the checkpoints of a run.

    Args:
        folder: the run's checkpoints folder; made at the first save.
        group: all ranks of the job; its first rank writes manifests and renames folders. Only
            Python objects and numbers of the host are sent over it, so a CPU group (gloo) suffices.
        keep_last: number of complete checkpoints to keep, 0 for all.
        keep_every: checkpoints at multiples of this step are kept besides; None: none.
        timeout_s: how long the first rank waits for the shards of a save in the background.
    """

    def __init__(
        self,
        folder: Path,
        *,
        group: Group,
        keep_last: int = 0,
        keep_every: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.folder = Path(folder)
        self.group = group
        self.keep_last, self.keep_every = keep_last, keep_every
        self.timeout_s = timeout_s
        self._shard_name = shard_name(group.index, group.size)
        self._owns_folder = group.is_first  # whether this rank makes and removes step folders
        self._staging = StagingBuffers()
        self._in_flight: tuple[int, BackgroundSave] | None = None  # step and thread
        self.num_failed = 0  # saves that failed so far
        self._stall_s = 0.0  # time for which saves have blocked the caller since `take_stall_s`

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor's arguments for a checkpointer with the same settings."""
        return {
            name: getattr(self, name)
            for name in ("folder", "group", "keep_last", "keep_every", "timeout_s")
        }

    def in_folder(self, folder: Path) -> "Checkpointer":
        """A checkpointer for another folder, with the same group and settings."""
        return Checkpointer(**{**self.settings, "folder": folder})

    def save(
        self, step: int, tensors: Tensors, *, prunes: bool = True, **content: Unpack[Content]
    ) -> Path:
        """Write one checkpoint. Every rank calls this; on return the checkpoint is complete and on
        the disk.

        Args:
            step: optimizer steps done; names the folder.
            tensors: box -> tensor of the box's shape, to be written by this rank. The boxes of all
                ranks together cover every tensor exactly once: one replica writes.
            prunes: whether older checkpoints are deleted afterwards, as `keep_last` says.
            content: the other fields of the manifest; `objects` is the same on all ranks.

        Returns:
            The folder of the checkpoint.

        Raises:
            StorageFault: the disk is full or the folder cannot be written. Older checkpoints are
                unchanged.
            CheckpointError: the ranks save different steps or objects, or their boxes do not cover
                the tensors exactly once. Nothing is committed.
        """
        self.wait()
        manifest = Manifest(step, {}, {}, **content)
        with self._attempt(step):
            shard = self._begin(step, tensors) / self._shard_name
            return run_on_all(
                self.group,
                lambda: write_shard(shard, tensors, manifest=_for_shard(manifest)),
                merge=lambda shards: self._commit(
                    commit.merge_shards(manifest, shards), prunes=prunes
                ),
            )

    def start_save(
        self, step: int, tensors: Tensors, *, prunes: bool = True, **content: Unpack[Content]
    ) -> None:
        """Start to write one checkpoint in the background; arguments as for `save`. Every rank
        calls this.

        On return the tensors are copied to host memory and may change. `wait` completes the save;
        one is in flight at a time.

        Raises:
            StorageFault: an earlier save that was still in flight has failed, or there is no space
                for this one.
        """
        self.wait()
        # as JSON now: the caller may change what it passed
        manifest = Manifest(step, {}, {}, **plain_json(content))
        with self._attempt(step):
            temporary = self._begin(step, tensors)
            save = StartedSave(temporary, self._staging.copy(tensors), manifest, prunes)
        self._in_flight = step, BackgroundSave(lambda is_cancelled: self._write(save, is_cancelled))

    def _write(self, save: "StartedSave", is_cancelled: Callable[[], bool]) -> Path | None:
        """Write the shard of this rank; on the first rank commit all shards. Runs on a thread."""
        temporary, index = save.temporary, self.group.index
        try:
            write_report(temporary, self._write_shard(save), index=index)
        except Exception as error:
            with suppress(OSError, StorageFault):  # `wait` reports it too
                # on a full disk the next line needs it
                (temporary / self._shard_name).unlink(missing_ok=True)
                write_failure(temporary, error, index=index)
            raise
        if not self.group.is_first:
            return None
        nbytes = wait_for_reports(
            temporary, self.group.size, timeout_s=self.timeout_s, is_cancelled=is_cancelled
        )
        final = self._merge(save, nbytes, is_cancelled=is_cancelled)
        self._prune(final, prunes=save.prunes)
        return final

    def _write_shard(self, save: "StartedSave") -> Manifest:
        return write_shard(
            save.temporary / self._shard_name, save.tensors, manifest=_for_shard(save.manifest)
        )

    def _merge(self, save: "StartedSave", nbytes: int, *, is_cancelled: Callable[[], bool]) -> Path:
        """Commit a save from its reports of `nbytes`; returns its folder."""
        size = self.group.size
        if nbytes < MAX_IN_THREAD:
            merge_reports(save.temporary, size, manifest=save.manifest)
        else:
            merge_apart(save.temporary, size, manifest=save.manifest, is_cancelled=is_cancelled)
        return commit.rename_to_final(self.folder, save.manifest.step)

    def wait(self) -> Path | None:
        """Complete the save in flight and return its folder, or None without one. Every rank calls
        this.

        Raises:
            StorageFault: it failed on some rank; nothing is committed.
        """
        if self._in_flight is None:
            return None
        step, save = self._in_flight
        self._in_flight = None

        def written() -> list[float]:
            if not self.group.is_first:
                save.result()
            return []

        with self._attempt(step):
            try:
                reduce_on_all(self.group, written)
            except CommunicationFault:
                raise
            # a rank that could write nothing, not even its report, for which the first rank waits
            except Exception:
                save.cancel()
                raise
            return run_on_first(self.group, save.result)

    def poll(self) -> Path | None:
        """The folder of the save in flight once it is committed, on the first rank; without
        communication.

        Raises:
            Exception: it failed on this rank, or on the first on any; `wait` raises the same on
                all.
        """
        if self._in_flight is None or self._in_flight[1].is_running:
            return None
        return self._in_flight[1].result()

    def take_stall_s(self) -> float:
        """Seconds for which saves have blocked this rank since the last call."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def give_up(self, timeout_s: float) -> bool:
        """After an error, without communication: give the save in flight some time; returns whether
        it succeeded.
        """
        return self._in_flight is None or self._in_flight[1].give_up(timeout_s)

    def restore(
        self,
        path: Path,
        targets: Tensors,
        *,
        config: Mapping[str, Any] | None = None,
        padded_rows: Mapping[str, int] | None = None,
        choose: TargetFilter | None = None,
        unread: Callable[[Manifest], Collection[str]] | None = None,
    ) -> Manifest:
        """Read this rank's tensors from a checkpoint written with any layout. Every rank calls
        this.

        Args:
            path: a step folder, as `latest` returns it.
            targets: box -> tensor of the box's shape, filled in place. For every kind of tensor
                loaded at all (model, optimizer), the ranks together load all tensors.
            config: the configuration of this run, for errors that list the model options that
                differ.
            padded_rows: parameters with one row per token of the padded vocabulary -> number of
                tokens; their padding may differ (compatibility.py).
            choose: which of the targets to read from the checkpoint of a manifest; None: all.
            unread: names of tensors of the checkpoint that no rank need load; None: none.

        Returns:
            The manifest: step, objects, config.

        Raises:
            DamagedCheckpoint: damaged or incomplete. The targets must not be used.
            CheckpointError: the checkpoint is of another model or of a newer format.
        """
        path = Path(path)
        # One reader: every rank needs all of it, of a 70B model at 16,384 ranks 112 MB, which are
        # sent as 16.
        with without_collection():
            sent = run_on_first(self.group, lambda: _pickle_manifest(self._read_manifest(path)))
            manifest: Manifest = pickle.loads(zlib.decompress(sent))
        targets = choose(manifest, targets) if choose else targets
        fitted = fit_padding(manifest, targets, rows=padded_rows or {})

        def read() -> list[float]:
            check_compatible(manifest, _dtypes(fitted), config=config)
            reads = plan_reads(manifest, fitted)
            read_chunks(path, reads, targets=fitted, open_source=self._open_source)
            names = {box.name for box in targets}
            return loads(manifest, names.union(unread(manifest) if unread else ()))

        # One collective: ranks that share cores wait several milliseconds in each.
        check_all_loaded(
            manifest, reduce_on_all(self.group, read, length=len(manifest.tensors)), config=config
        )
        return manifest

    def _read_manifest(self, path: Path) -> Manifest:
        """The manifest of a complete checkpoint."""
        return store.require_complete(path)

    def _open_source(self, path: Path) -> Source | None:
        """The source of a shard file that is not in its folder; None: it is, or in a store."""
        return None

    def latest(self, *, below: int | None = None) -> Path | None:
        """`newest_complete` of this run, the same on every rank.

        Args:
            below: the step below which all considered steps are; None for no bound.

        Raises:
            CheckpointError: the newest is of a newer format.
        """
        return run_on_first(self.group, lambda: store.newest_complete(self.folder, below=below))

    def set_aside_after(self, step: int) -> list[Path]:
        """`commit.set_aside_after` in the folder of this run, on the first rank alone."""
        return commit.set_aside_after(self.folder, step)

    def _begin(self, step: int, tensors: Tensors) -> Path:
        """Make the temporary folder of a save and check the free space."""

        def start() -> list[float]:
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            if not self.group.is_first:
                return [nbytes, 0, 0]
            commit.start_writing(self.folder, step)
            return [nbytes, step, shutil.disk_usage(self.folder).free]

        # The step of the first rank: `merge_shards` finds the rank that saves another one.
        needed, first_step, free = map(int, reduce_on_all(self.group, start, length=3, op="sum"))
        if needed > free:  # the same numbers on all ranks
            text = f"{os.strerror(errno.ENOSPC)}: a checkpoint needs {needed:,} bytes"
            raise storage_fault(OSError(errno.ENOSPC, text, str(self.folder)))
        return commit.temporary_folder(self.folder, first_step)

    def _commit(self, manifest: Manifest, *, prunes: bool) -> Path:
        """Commit a checkpoint with written shards, then delete old ones; returns its folder."""
        final = commit.commit(self.folder, manifest.step, text=to_json(manifest))
        self._prune(final, prunes=prunes)
        return final

    def _prune(self, final: Path, *, prunes: bool) -> None:
        """Delete the checkpoints that `keep_last` does not keep, if the save prunes."""
        if prunes:
            keep_newest(self.folder, self.keep_last, written=final, keep_every=self.keep_every)

    @contextmanager
    def _attempt(self, step: int) -> Iterator[None]:
        """Measure a part of a save; on failure count it and remove the temporary folder."""
        start = time.perf_counter()
        try:
            yield
        except Exception:
            self.num_failed += 1
            if self._owns_folder:
                try_to_remove(commit.temporary_folder(self.folder, step), is_quiet=True)
            raise
        finally:
            self._stall_s += time.perf_counter() - start


def _pickle_manifest(manifest: Manifest) -> bytes:
    """A manifest, pickled and compressed."""
    return zlib.compress(pickle.dumps(manifest), 1)


def _for_shard(manifest: Manifest) -> Manifest:
    """The manifest that each rank sends for its shard, without long fields equal on all ranks."""
    return replace(manifest, config={}, topology={})


def _dtypes(targets: Tensors) -> dict[TensorBox, str]:
    for box, tensor in targets.items():
        assert tuple(tensor.shape) == box.box.shape, (
            f"{box} got a tensor of {tuple(tensor.shape)}: wrong elements"
        )
    return {box: DTYPE_NAMES[tensor.dtype] for box, tensor in targets.items()}
