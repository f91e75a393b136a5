"""`MemoryCheckpointer`: saves into the memory of the hosts, with a copy on a partner's host.

    every rank           copy to host memory; thread: shard in the folder of its host -> report
                         read the shard of the rank whose partner it is -> the same folder -> report
    rank 0               all reports: the merged manifest -> all hosts
    first rank per host  manifest, rename -> report; after all reports: delete the older checkpoint

The files are those of a checkpoint on a disk. Until all hosts have committed a step, all of them
have the one before, so that a kill at any instant leaves one of the two. A folder holds at most
these two.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Unpack

import torch
from torch._C._distributed_c10d import Store

from nanotrain.checkpoint import commit
from nanotrain.checkpoint.all_ranks import reduce_on_all, run_on_all
from nanotrain.checkpoint.background import report_path
from nanotrain.checkpoint.checkpointer import Checkpointer, Content, StartedSave, Tensors
from nanotrain.checkpoint.host_folder import host_root, in_use
from nanotrain.checkpoint.manifest import ChunkEntry, Manifest, from_json, to_json
from nanotrain.checkpoint.messages import Messages
from nanotrain.checkpoint.peers import Peer, PeerServer, PeerSource
from nanotrain.checkpoint.read import ShardFile
from nanotrain.checkpoint.retention import deleted_name, try_to_remove
from nanotrain.checkpoint.store import leftovers, step_entries, step_of
from nanotrain.checkpoint.stored import MANIFEST
from nanotrain.checkpoint.write import PIECE_BYTES, raw_bytes
from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.group import Group
from nanotrain.comm.hosts import own_address
from nanotrain.errors import StorageFault
from nanotrain.quantities import describe_bytes
from nanotrain.runs.files import write_text
from nanotrain.topology.partners import Host, plan_partners

SPARE_SHARE = 8  # one part in so many of the memory file system stays free, for data workers


@dataclass(frozen=True)
class HostMemory:
    """The folder of a run in the memory of this host, and the servers of all ranks."""

    folder: Path
    group: Group  # all ranks
    hosts: tuple[Host, ...]  # by rank
    peers: tuple[Peer, ...]  # by rank

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this host."""
        name = self.hosts[self.group.index].name
        return tuple(rank for rank, host in enumerate(self.hosts) if host.name == name)

    @property
    def is_host_first(self) -> bool:
        """Whether this rank renames and deletes folders of its host."""
        return self.local_ranks[0] == self.group.index

    @cached_property
    def partners(self) -> tuple[int | None, ...]:
        """The rank that keeps a copy of each rank's shard."""
        return plan_partners(self.hosts)

    @property
    def copied_ranks(self) -> list[int]:
        """The ranks of which this rank keeps a copy."""
        ranks = enumerate(self.partners)
        return [rank for rank, partner in ranks if partner == self.group.index]


@contextmanager
def open_host_memory(
    base: Path, key: str, *, group: Group, hosts: tuple[Host, ...]
) -> Iterator[HostMemory]:
    """Open the folder of a run on every host, and start the servers. Collective.

    Args:
        base: the memory file system.
        key: `run_key` of the run.
        group: all ranks of the job.
        hosts: the host of each rank.

    Raises:
        EnvironmentFault: a host cannot make the folder; on every rank.
    """
    host = hosts[group.index].name
    run_on_all(group, lambda: host_root(base, host), merge=lambda roots: None)
    folder = host_root(base, host) / key
    with ExitStack() as stack:
        stack.enter_context(in_use(folder))
        server = PeerServer(folder, own_address())
        stack.callback(server.close)
        peers = tuple(all_gather_object(server.peer, group))
        yield HostMemory(folder, group, hosts, peers)


class MemoryCheckpointer(Checkpointer):
    """Writes the checkpoints of a run into the memory of its hosts.

    Args:
        memory: the folder of this host.
        store: the store at which the ranks met.
        num_starts: starts of the run so far: a step that a later one repeats is not used.
        timeout_s: how long a rank waits for the others in a save.
    """

    def __init__(
        self, memory: HostMemory, *, store: Store, timeout_s: float, num_starts: int = 1
    ) -> None:
        super().__init__(memory.folder, group=memory.group, timeout_s=timeout_s)
        self._owns_folder = memory.is_host_first
        self._memory = memory
        self._store = store
        self._num_starts = num_starts
        self._num_saves = 0
        self._host_bytes: int | None = None  # of a checkpoint, on this host

    def start_save(
        self, step: int, tensors: Tensors, *, prunes: bool = True, **content: Unpack[Content]
    ) -> None:
        """As of `Checkpointer`; the hosts of the shards are recorded."""
        hosts = [host.name for host in self._memory.hosts]
        facts = {"hosts": hosts, "num_starts": self._num_starts}
        content["topology"] = {**content["topology"], **facts}
        super().start_save(step, tensors, prunes=prunes, **content)

    def drop(self, *, keep: int | None = None) -> None:
        """Delete the checkpoints on this host, except the checkpoint of one step."""
        if not self._memory.is_host_first:
            return
        for path in step_entries(self.folder):
            if step_of(path) != keep:
                deleted = deleted_name(path)
                os.rename(path, deleted)
        for path in leftovers(self.folder):
            try_to_remove(path, is_quiet=True)

    def _begin(self, step: int, tensors: Tensors) -> Path:
        """Make the temporary folder on every host and check the free memory.

        Raises:
            StorageFault: a host has too little; on every rank.
        """
        if self._host_bytes is None:
            self._host_bytes = self._bytes_of_host(sum(t.nbytes for t in tensors.values()))
        needed = self._host_bytes

        def start() -> list[float]:
            """The memory that this host lacks, and the step on the first rank."""
            if not self._memory.is_host_first:
                return [0, 0]
            commit.start_writing(self.folder, step)
            usage = shutil.disk_usage(self.folder)
            missing = needed + usage.total // SPARE_SHARE - usage.free
            return [max(0, missing), step if self.group.is_first else 0]

        missing, first_step = map(int, reduce_on_all(self.group, start, length=2))
        if missing:
            raise StorageFault(
                f"no memory checkpoint of step {step}: a host lacks {describe_bytes(missing)}",
                why=f"a checkpoint takes {describe_bytes(needed)} on this host, and an eighth of "
                "the memory file system stays free",
                fix="enlarge it (mount -o remount,size=...), or name a folder of another one with "
                "--memory-checkpoint-dir",
            )
        return commit.temporary_folder(self.folder, first_step)

    def _bytes_of_host(self, nbytes: int) -> int:
        """Bytes of a checkpoint on this host, with the copies for partners. Collective."""
        sizes = all_gather_object(nbytes, self.group)
        memory = self._memory
        here = set(memory.local_ranks)
        total = 0
        for rank, size in enumerate(sizes):
            total += size if rank in here else 0
            total += size if memory.partners[rank] in here else 0
        return total

    def _write(self, save: StartedSave, is_cancelled: Callable[[], bool]) -> Path | None:
        """Write this rank's shard, copy its partner's, and commit with all others."""
        self._num_saves += 1  # the same on all ranks
        messages = Messages(self._store, f"memory-{self._num_saves}/", self.timeout_s, is_cancelled)
        index = self.group.index
        with messages.telling_failure(index):
            messages.put(f"shard-{index}", to_json(self._write_shard(save)))
            for rank in self._memory.copied_ranks:
                self._copy(rank, messages.take(f"shard-{rank}"), save=save)
            messages.put(f"copied-{index}")
            final = self._commit_first(save, messages) if self.group.is_first else None
            if self._memory.is_host_first:
                self._commit_on_host(save, messages)
            if self.group.is_first:
                self._finish_hosts(messages)
            if self._memory.is_host_first:
                messages.take("done")
                self.drop(keep=save.manifest.step)
        return final

    def _copy(self, rank: int, text: str, *, save: StartedSave) -> None:
        """Read the shard of another rank, chunk by chunk, into the folder of this host.

        Raises:
            DamagedCheckpoint: a chunk arrives with another checksum.
            OSError: the rank's host does not answer, or the memory is full.
        """
        shard = from_json(text, is_shard=True)
        for name, size in shard.files.items():
            file = f"{save.temporary.name}/{name}"
            source = PeerSource(self._memory.peers[rank], file, size=size)
            _copy_file(save.temporary / name, source, shard=shard)

    def _commit_first(self, save: StartedSave, messages: Messages) -> Path:
        """Merge the reports of all ranks, commit on this host, send the manifest to the others."""
        for index in range(self.group.size):
            messages.take(f"copied-{index}", is_last=True)
        nbytes = 0
        for index in range(self.group.size):
            text = messages.take(f"shard-{index}", is_last=True)
            write_text(report_path(save.temporary, index), text)
            nbytes += len(text)
        final = self._merge(save, nbytes, is_cancelled=messages.is_cancelled)
        messages.put("manifest", (final / MANIFEST).read_text())
        return final

    def _commit_on_host(self, save: StartedSave, messages: Messages) -> None:
        """Commit the checkpoint on all hosts but the first rank's."""
        text = messages.take("manifest")
        if not self.group.is_first:
            commit.commit(self.folder, save.manifest.step, text=text)
        messages.put(f"committed-{self._memory.hosts[self.group.index].name}")

    def _finish_hosts(self, messages: Messages) -> None:
        """Wait until all hosts have the checkpoint."""
        for name in {host.name for host in self._memory.hosts}:
            messages.take(f"committed-{name}", is_last=True)
        messages.forget("manifest")
        messages.put("done")
        if self._num_saves > 1:  # all hosts have read it before they began this save
            replace(messages, prefix=f"memory-{self._num_saves - 1}/").forget("done")


def _copy_file(path: Path, source: PeerSource, *, shard: Manifest) -> None:
    """Copy a shard file, and compare every chunk of the copy with its checksum."""
    with path.open("xb") as file:
        piece = memoryview(bytearray(min(source.size, 16 * PIECE_BYTES)))
        offset = 0
        while offset < source.size:
            count = source.read_into(piece, offset)
            if not count:
                raise OSError(0, f"the copy of {path.name} ends after {offset} bytes", str(path))
            file.write(piece[:count])
            offset += count
    check_file(path, chunks_by_file(shard)[path.name])


def chunks_by_file(manifest: Manifest) -> dict[str, list[tuple[ChunkEntry, str]]]:
    """The chunks of every shard file, with their dtypes."""
    chunks: dict[str, list[tuple[ChunkEntry, str]]] = {name: [] for name in manifest.files}
    for entry in manifest.tensors.values():
        for chunk in entry.chunks:
            chunks[chunk.file].append((chunk, entry.dtype))
    return chunks


def check_file(path: Path, chunks: Sequence[tuple[ChunkEntry, str]]) -> None:
    """Compare chunks of a shard file with their checksums.

    Raises:
        DamagedCheckpoint: one differs, or the file is missing or short.
    """
    with ShardFile(path) as source:
        for chunk, dtype in chunks:
            into = raw_bytes(torch.empty(chunk.nbytes, dtype=torch.uint8))
            source.read(chunk, source.offset(chunk, dtype), into=into)
