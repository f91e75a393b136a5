"""Read chunks: open each needed shard file once, check every chunk, and copy parts of it to the target tensors.

    ShardFile             one safetensors file, with the location of every key
    read_chunks           carry out `plan_reads`, file after file, the chunks of a file in parallel
    read_global_tensors   full tensors, one at a time, for exports
    read_box              one box of a tensor

A chunk is read in full even for a part of it, since its checksum covers all of it: `plan.CHUNK_BYTES` bounds the
excess. Plain `preadv` instead of a memory map: measured 2.4 GB/s against 0.9 cold, since page faults get no read-ahead.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import torch

from nanotrain.checkpoint.manifest import ChunkEntry, DamagedCheckpoint, Manifest, TensorEntry, damaged
from nanotrain.checkpoint.plan import ChunkRead, plan_reads
from nanotrain.checkpoint.store import read_manifest
from nanotrain.checkpoint.write import PIECE_BYTES, crc32, file_threads, raw_bytes
from nanotrain.errors import CheckpointError
from nanotrain.precision.dtypes import SAFETENSORS_NAMES, TORCH_DTYPES
from nanotrain.spec.boxes import TensorBox
from nanotrain.untrusted import object_of, parse_json, shown

Tensors = Mapping[TensorBox, torch.Tensor]
MAX_HEADER_BYTES = 100_000_000  # as the safetensors library; 600,000 chunks of 32 MiB


class ShardFile:
    """An open shard file of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing, a link, no regular file, or has no readable header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Without O_NOFOLLOW a link could lead out of the folder; O_NONBLOCK returns at once on a pipe.
            self._handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            why = "it is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
            raise self._damaged(f"{path} cannot be opened", why) from None
        try:
            self._header, self._begin, self._size = self._read_header()
        except BaseException:
            os.close(self._handle)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._handle)

    def read(self, chunk: ChunkEntry, offset: int, *, into: memoryview) -> None:
        """Read a chunk at its offset into host memory of `chunk.nbytes` bytes.

        Raises:
            DamagedCheckpoint: the file ends early, or the checksum differs.
        """
        done, checksum = 0, 0
        try:
            while piece := into[done : done + PIECE_BYTES]:
                count = os.preadv(self._handle, [piece], offset + done)
                if not count:
                    break
                checksum, done = crc32(piece[:count], checksum), done + count
        except OSError as error:  # a bad sector
            raise self._damaged(f"chunk {chunk.key} is damaged", f"{self.path}: {error.strerror}") from None
        if done < chunk.nbytes:
            why = f"{self.path} ends {chunk.nbytes - done} bytes too early"
            raise self._damaged(f"chunk {chunk.key} is damaged", why)
        if (present := f"{checksum:08x}") != chunk.crc32:
            why = f"its bytes in {self.path} have crc32 {present}, the manifest has {chunk.crc32}"
            raise self._damaged(f"chunk {chunk.key} is damaged", why)

    def offset(self, chunk: ChunkEntry, dtype: str) -> int:
        """The offset of a chunk in the file.

        Raises:
            DamagedCheckpoint: its entry in the header is not that of the manifest, or the file ends before it does.
        """
        match self._header.get(chunk.key):
            case {"dtype": name, "shape": shape, "data_offsets": [int(start), int(stop)]}:
                expected = SAFETENSORS_NAMES[dtype], list(chunk.box.shape), chunk.nbytes
                if (name, shape, stop - start) == expected and 0 <= start <= self._size - self._begin - chunk.nbytes:
                    return self._begin + start
                there = f"{shown(name)} {str(shape)[:99]} in bytes {shown(start)} to {shown(stop)} of {self._size}"
                why = f"{self.path} holds it as {there}, the manifest as {expected}"
            case entry:
                why = f"{self.path} has {shown(entry)} for it, without dtype, shape and two data_offsets"
        raise self._damaged(f"chunk {chunk.key} is damaged", why)

    def _read_header(self) -> tuple[dict[str, Any], int, int]:
        """The header, its end in the file, and the size of the file."""
        status = os.fstat(self._handle)
        if not stat.S_ISREG(status.st_mode):
            raise self._damaged(f"{self.path} is damaged", "it is no regular file")
        length = int.from_bytes(os.pread(self._handle, 8, 0), "little")
        if not 2 <= length <= min(status.st_size - 8, MAX_HEADER_BYTES):
            why = f"a header of {length} bytes in a file of {status.st_size} bytes"
            raise self._damaged(f"{self.path} is damaged", why)
        try:
            header = object_of(parse_json(os.pread(self._handle, length, 8)), "its header")
        except ValueError as error:
            raise self._damaged(f"{self.path} is damaged", f"its header is no JSON object ({error})") from None
        return header, 8 + length, status.st_size

    def _damaged(self, what: str, why: str) -> DamagedCheckpoint:
        return damaged(what, why=why, path=self.path.parent)


def read_chunks(folder: Path, reads: Mapping[str, tuple[ChunkRead, ...]], *, targets: Tensors) -> None:
    """Read chunks and copy their parts into the target tensors, in place.

    Args:
        reads: chunks by file, as `plan_reads` returns them.
        targets: box -> tensor of the box's shape, on any device; elements are cast to its float dtype.

    Raises:
        CheckpointError: a chunk is damaged; the targets are then partly filled and must not be used.
    """
    with file_threads() as start:
        for file, chunks in reads.items():
            with ShardFile(folder / file) as shard:
                # Located before the first read, measured 10 % faster: each read empties the processor's caches.
                located = [(shard.offset(read.chunk, read.dtype), read) for read in chunks]
                located.sort(key=itemgetter(0))  # a disk reads ahead of the last read
                list(start(lambda one, shard=shard: _read_chunk(shard, one, targets=targets), located))


def read_global_tensors(path: Path, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and full tensors of a complete step folder, in the order of `names`, one in memory at a time.

    The tensors are on the CPU, in the checkpoint's dtype. Names are as in the manifest ("model/final_norm.weight").

    Raises:
        CheckpointError: no such tensor, or a chunk of it is damaged.
    """
    manifest = read_manifest(path)
    for name in names:
        entry = require_tensor(path, manifest, name=name)
        yield name, read_box(path, manifest, box=TensorBox.full(name, entry.shape))


def read_box(path: Path, manifest: Manifest, *, box: TensorBox) -> torch.Tensor:
    """One box of a tensor of a step folder, on the CPU, in the checkpoint's dtype; `manifest` is that of the folder."""
    tensor = torch.empty(box.box.shape, dtype=TORCH_DTYPES[manifest.tensors[box.name].dtype])
    read_chunks(path, plan_reads(manifest, [box]), targets={box: tensor})
    return tensor


def require_tensor(path: Path, manifest: Manifest, *, name: str) -> TensorEntry:
    """The entry of a tensor in the manifest of a step folder.

    Raises:
        CheckpointError: no such tensor.
    """
    entry = manifest.tensors.get(name)
    if entry is None:
        raise CheckpointError(
            f"{path} holds no tensor {name}",
            why=f"it holds {len(manifest.tensors)} others, the first is {next(iter(manifest.tensors), 'none')}",
            fix="`nanotrain checkpoint inspect` lists them",
        )
    return entry


def _read_chunk(shard: ShardFile, located: tuple[int, ChunkRead], *, targets: Tensors) -> None:
    offset, read = located
    chunk = torch.empty(read.chunk.box.shape, dtype=TORCH_DTYPES[read.dtype])
    shard.read(read.chunk, offset, into=raw_bytes(chunk))
    for copy in read.copies:
        targets[copy.target].detach()[copy.dest.slices()].copy_(chunk[copy.source.slices()])
