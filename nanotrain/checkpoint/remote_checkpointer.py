"""`RemoteCheckpointer`: saves into a local folder that are uploaded by the same threads.

    rank k   copy to host memory; thread: shard in the folder -> report -> ... -> upload, read back
             -> report
    rank 0   thread: the same; all reports: manifest, rename -> address -> all reports: manifest in
             object storage

The local folder is complete before anything is uploaded, so a run that ends in between resumes from
it. Each machine may have its own folder: the reports are messages over the store at which the ranks
met. Uploaded objects are read back, and each chunk is compared with its checksum in the manifest,
before the manifest commits them.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Unpack

import torch
from torch._C._distributed_c10d import Store

from nanotrain.checkpoint.background import report_path
from nanotrain.checkpoint.checkpointer import Checkpointer, Content, StartedSave, Tensors
from nanotrain.checkpoint.manifest import DamagedCheckpoint, Manifest, to_json
from nanotrain.checkpoint.messages import Messages
from nanotrain.checkpoint.read import RemoteSource, ShardFile
from nanotrain.checkpoint.run_files import FileUploads
from nanotrain.checkpoint.store import (
    complete_checkpoints,
    file_sizes,
    read_manifest,
    step_entries,
    step_folder,
    step_of,
)
from nanotrain.checkpoint.stored import (
    MANIFEST,
    MARKER,
    SUPERSEDED,
    Stored,
    mark,
    steps_of,
    stored_at,
)
from nanotrain.checkpoint.write import raw_bytes
from nanotrain.errors import StorageFault
from nanotrain.log import get_logger
from nanotrain.runs.files import write_text
from nanotrain.storage.remote import Remote

UPLOADS = 3  # attempts for a shard whose stored bytes differ from the written ones
READS = 2  # attempts to verify an object before it is uploaded again
log = get_logger(__name__)


class RemoteCheckpointer(Checkpointer):
    """Writes and reads the checkpoints of a run in object storage.

    Args:
        local: checkpointer of the local folder; a machine need not see the folders of others.
        remote: the address of the run.
        store: the store at which the ranks met.
    """

    def __init__(self, local: Checkpointer, remote: Remote, *, store: Store) -> None:
        super().__init__(**local.settings)
        self._remote = remote / "checkpoints"
        self._store = store
        self._num_saves = 0
        self.files = FileUploads(self.folder.parent, remote)

    def save(
        self, step: int, tensors: Tensors, *, prunes: bool = True, **content: Unpack[Content]
    ) -> Path:
        """As of `Checkpointer`; on return the checkpoint is complete in object storage."""
        self.start_save(step, tensors, prunes=prunes, **content)
        path = self.wait()
        assert path is not None, "a save was in flight"
        return path

    def set_aside_after(self, step: int) -> list[Path]:
        """As of `Checkpointer`, first in object storage."""
        for path in step_entries(self.folder):
            stored = stored_at(path) if step_of(path) > step else None
            if stored is not None:
                (stored.remote / SUPERSEDED).write(b"")
        return super().set_aside_after(step)

    def _write(self, save: StartedSave, is_cancelled: Callable[[], bool]) -> Path | None:
        """Write this rank's shard, upload it, and on the first rank commit the checkpoint."""
        self._num_saves += 1  # the same on all ranks
        messages = Messages(self._store, f"save-{self._num_saves}/", self.timeout_s, is_cancelled)
        with messages.telling_failure(self.group.index):
            save.temporary.mkdir(parents=True, exist_ok=True)  # on machines without the first rank
            shard = self._write_shard(save)
            messages.put(f"shard-{self.group.index}", to_json(shard))
            if self.group.is_first:
                final = self._commit_locally(save, messages)
                stored, older = self._destination(final)
                messages.put("place", json.dumps([stored.remote.path, stored.sizes]))
            path, sizes = json.loads(messages.take("place"))
            stored = Stored(Remote(self._remote.scheme, path), sizes)
            self._upload(
                stored.remote, shard, folders=(step_folder(self.folder, shard.step), save.temporary)
            )
            messages.put(f"uploaded-{self.group.index}")
            if self.group.is_first:
                for index in range(self.group.size):
                    messages.take(f"uploaded-{index}", is_last=True)
                messages.forget("place")
                self._commit_remotely(final, stored, older=older)
                self._prune(final, prunes=save.prunes)
                return final
            self._forget_shard(save, stored)
        return None

    def finish(self) -> None:
        """On the first rank, upload changed files and checkpoints that are complete locally alone.

        Such a checkpoint is left by a kill between the two commits of a save, or by a failed save.

        Raises:
            StorageFault: a file cannot be written.
        """
        complete = complete_checkpoints(self.folder)
        if complete:
            self._prune(complete[-1], prunes=True)
        for path in complete:
            if path.exists() and stored_at(path) is None:
                stored, older = self._destination(path)
                self._upload(stored.remote, read_manifest(path), folders=(path,))
                self._commit_remotely(path, stored, older=older)
        self.files.upload()

    def _commit_locally(self, save: StartedSave, messages: Messages) -> Path:
        """Collect the shard reports of all ranks and write the merged manifest to a local disk."""
        nbytes = 0
        for index in range(self.group.size):
            text = messages.take(f"shard-{index}", is_last=True)
            write_text(report_path(save.temporary, index), text)
            nbytes += len(text)
        final = step_folder(self.folder, save.manifest.step)
        # the mark of an earlier save of this step, whose folder stays until it is replaced
        (final / MARKER).unlink(missing_ok=True)
        return self._merge(save, nbytes, is_cancelled=messages.is_cancelled)

    def _destination(self, final: Path) -> tuple[Stored, list[Stored]]:
        """The address for a step folder, and saves that it replaces; deletes leftovers of kills."""
        older: list[Stored] = []
        name = final.name
        for saves in steps_of(self._remote.sizes()).values():
            for save in saves:
                sizes = {file: stat.size for file, stat in save.objects.items()}
                stored = Stored(self._remote / save.folder, sizes)
                if not save.is_committed:
                    stored.delete()
                elif save.folder.partition(".")[0] == final.name:
                    name = f"{final.name}.{save.number + 1}"
                    if not save.is_superseded:
                        older.append(stored)
        return Stored(self._remote / name, file_sizes(final)), older

    def _commit_remotely(self, final: Path, stored: Stored, *, older: list[Stored]) -> None:
        """Upload the manifest after all shards; delete replaced saves and older local shards."""
        # before, as a resume from this step needs the rows of metrics until there
        self.files.upload()
        (stored.remote / MANIFEST).put(final / MANIFEST)
        mark(final, stored)
        log.info("uploaded %s", stored.remote)
        for replaced in older:
            replaced.delete()
        for path in step_entries(self.folder):
            other = stored_at(path) if step_of(path) < step_of(final) else None
            if other is not None:
                for name in other.sizes:
                    (path / name).unlink(missing_ok=True)

    def _upload(self, remote: Remote, shard: Manifest, *, folders: tuple[Path, ...]) -> None:
        """Upload shards, and compare every chunk of the objects with its checksum.

        Args:
            remote: the folder to which they go.
            shard: a manifest with their sizes and checksums.
            folders: folders in which they may be; on a machine without the first rank the folder of
                the save stays.

        Raises:
            StorageFault: one cannot be written, or differs each time.
        """
        for name, size in shard.files.items():
            file = next(folder / name for folder in folders if (folder / name).exists())
            for _ in range(UPLOADS):
                (remote / name).put(file)
                fault = self._difference(remote / name, size, shard=shard)
                if fault is None:
                    break
            else:
                raise StorageFault(
                    f"{remote / name} cannot be written",
                    why=f"uploaded {UPLOADS} times, it differs from what was written: {fault}",
                    fix="check memory and network",
                )

    def _difference(
        self, remote: Remote, size: int, *, shard: Manifest
    ) -> DamagedCheckpoint | None:
        """How an object differs from its shard; a byte may also be damaged on the way back."""
        fault = None
        for _ in range(READS):
            try:
                self._read_back(remote, size, shard=shard)
                return None
            except DamagedCheckpoint as error:
                fault = error
        return fault

    @staticmethod
    def _read_back(remote: Remote, size: int, *, shard: Manifest) -> None:
        """Read every chunk of a stored object, which compares the checksums."""
        path = Path(remote.path)
        with ShardFile(path, RemoteSource(remote, size)) as source:
            for entry in shard.tensors.values():
                for chunk in entry.chunks:
                    if chunk.file == path.name:
                        into = raw_bytes(torch.empty(chunk.nbytes, dtype=torch.uint8))
                        source.read(chunk, source.offset(chunk, entry.dtype), into=into)

    def _forget_shard(self, save: StartedSave, stored: Stored) -> None:
        """Delete the local shard on a machine without the first rank; keep the storage address."""
        final = step_folder(self.folder, save.manifest.step)
        if not (final / MANIFEST).exists():
            mark(final, stored)
            (save.temporary / self._shard_name).unlink(missing_ok=True)
            with suppress(OSError):  # it may hold shards of other ranks of this machine
                save.temporary.rmdir()
