"""Write the shard file of one rank: safetensors, chunk by chunk, with the checksum of each chunk.

    plan_writes   the tensors of a rank -> key, offset and size of every chunk
    write_shard   carry it out: chunks in parallel, each copied to the host, summed and written;
                  then fsync

`safetensors.save_file` would need a second pass over the bytes for checksums, and all tensors of a
device on the host at once. The format is an eight-byte length, a JSON header and the bytes, so it
is written here directly.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanotrain.checkpoint.manifest import ChunkEntry, Manifest, TensorEntry
from nanotrain.checkpoint.plan import split_box
from nanotrain.precision.dtypes import DTYPE_NAMES, SAFETENSORS_NAMES
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.system import cores_per_rank

# both give the same number and release the GIL; ISA-L 64 GB/s in the cache and 30 in memory, zlib
# 4.4 (measured)
try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

PIECE_BYTES = 2**19
"""Summed at a time: the checksum finds the piece in the processor's cache (measured 64 GB/s there,
30 in memory).
"""
# Bytes of a value, and the bits of infinity; NaN has larger ones.
_INFINITY = {
    "fp64": (8, 0x7FF0 << 48),
    "fp32": (4, 0x7F80 << 16),
    "fp16": (2, 0x7C00),
    "bf16": (2, 0x7F80),
}
MAX_THREADS = 4
"""Checksums, copies, reads and writes release the GIL; more threads than a few only compete for the
disk.
"""


@dataclass(frozen=True)
class ChunkWrite:
    """One chunk of a shard file, and the rank's tensor (`source`) that it is a part of."""

    source: TensorBox
    box: Box
    dtype: str
    key: str
    offset: int
    nbytes: int


def shard_name(index: int, size: int) -> str:
    """The name of a rank's shard file.

    >>> shard_name(0, 4)
    'shard-00000-of-00004.safetensors'
    """
    return f"shard-{index:05d}-of-{size:05d}.safetensors"


def plan_writes(tensors: Mapping[TensorBox, torch.Tensor]) -> tuple[ChunkWrite, ...]:
    """Split a rank's tensors into chunks, laid end to end; offsets count from the end of the
    header.
    """
    offset = 0
    writes = []
    for source, tensor in tensors.items():
        assert tuple(tensor.shape) == source.box.shape, (
            f"{source} got a tensor of {tuple(tensor.shape)}"
        )
        dtype = DTYPE_NAMES[tensor.dtype]
        itemsize = tensor.element_size()
        for box in split_box(source.box, itemsize):
            key = f"{source.name}@{box.text}"
            nbytes = box.numel * itemsize
            writes.append(ChunkWrite(source, box, dtype, key, offset, nbytes))
            offset += nbytes
    return tuple(writes)


def write_shard(
    path: Path,
    tensors: Mapping[TensorBox, torch.Tensor],
    *,
    manifest: Manifest,
    read: Callable[[ChunkWrite], torch.Tensor] | None = None,
) -> Manifest:
    """Write this rank's tensors and fsync.

    Args:
        path: the file to make; must not exist.
        tensors: box -> tensor of the box's shape, on any device, with any strides; not changed.
        manifest: step and objects of the save.
        read: a function that returns the values of a chunk where `tensors` are on the meta device,
            so that only chunks are in memory; called on several threads.

    Returns:
        The manifest of this shard alone, with checksums. Without bytes to write no file is made.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """

    def slice_of(write: ChunkWrite) -> torch.Tensor:
        local_box = write.box.within(write.source.box)
        return tensors[write.source].detach()[local_box.slices()]

    writes = plan_writes(tensors)
    entries = {}
    for box, tensor in tensors.items():
        entries[box.name] = TensorEntry(box.shape, DTYPE_NAMES[tensor.dtype], ())
    if not writes:
        return replace(manifest, tensors=entries)
    header = _header(writes)
    written = _write_file(path, writes, header=header, read=read or slice_of)
    chunks: dict[str, list[ChunkEntry]] = {name: [] for name in entries}
    not_finite = set()
    for write, outcome in zip(writes, written, strict=True):
        name = write.source.name
        chunk = ChunkEntry(write.box, path.name, write.key, outcome.checksum, write.nbytes)
        chunks[name].append(chunk)
        if not outcome.is_finite:
            not_finite.add(name)
    for name, entry in entries.items():
        entries[name] = replace(entry, chunks=tuple(chunks[name]))
    size = len(header) + sum(write.nbytes for write in writes)
    return replace(
        manifest, files={path.name: size}, tensors=entries, not_finite=tuple(sorted(not_finite))
    )


class _WrittenChunk(NamedTuple):
    """A chunk that is in the file."""

    checksum: str  # CRC-32
    is_finite: bool


def _write_file(
    path: Path,
    writes: Sequence[ChunkWrite],
    *,
    header: bytes,
    read: Callable[[ChunkWrite], torch.Tensor],
) -> list[_WrittenChunk]:
    """Write header and chunks into a new file and fsync."""

    def write_one(write: ChunkWrite) -> _WrittenChunk:
        return _write_chunk(handle, write, begin=len(header), chunk=read(write))

    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_at(handle, memoryview(header), offset=0)
        with file_threads(len(writes)) as start:
            written = list(start(write_one, writes))
        os.fsync(handle)
    except OSError as error:  # a failed call on a descriptor names no file
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)
    return written


@contextmanager
def file_threads(num_calls: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """A `map` that makes several calls on several threads, where this rank has several cores.

    Ranks that share a core are slower with threads: measured 30 % more processor time for the same
    reads.
    """
    count = min(MAX_THREADS, cores_per_rank(), num_calls)
    if count <= 1:
        yield map
        return
    with ThreadPoolExecutor(count) as pool:
        yield pool.map


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _header(writes: tuple[ChunkWrite, ...]) -> bytes:
    """The header of a safetensors file with these chunks."""
    entries = {}
    for write in writes:
        end = write.offset + write.nbytes
        entries[write.key] = {
            "dtype": SAFETENSORS_NAMES[write.dtype],
            "shape": write.box.shape,
            "data_offsets": [write.offset, end],
        }
    assert len(entries) == len(writes), (
        "a box was given twice on one rank: one of the two would be lost"
    )
    text = json.dumps(entries, separators=(",", ":")).encode()
    padding = -len(text) % 8  # in the format the bytes begin at a multiple of eight
    text += b" " * padding
    return len(text).to_bytes(8, "little") + text


def _write_chunk(
    handle: int, write: ChunkWrite, *, begin: int, chunk: torch.Tensor
) -> _WrittenChunk:
    """Write one chunk into a file whose data begin at `begin`."""
    data = raw_bytes(chunk.to("cpu").contiguous())
    offset = begin + write.offset
    checksum = 0
    finite = True
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        checksum = crc32(piece, checksum)
        finite = finite and is_finite(piece, write.dtype)
        _write_at(handle, piece, offset=offset + start)
    # Starts the write-back of this chunk now instead of all at the fsync: measured 0.10 s against
    # 0.17 s for 256 MiB.
    os.posix_fadvise(handle, offset, write.nbytes, os.POSIX_FADV_DONTNEED)
    return _WrittenChunk(f"{checksum:08x}", finite)


def is_finite(data: memoryview, dtype: str) -> bool:
    """Whether all values of a buffer are finite.

    The bits of a float, read as an integer, are at least those of infinity if it is infinite or
    NaN. So two maxima suffice, of positive and of negative values: they read 32 GB/s in memory
    that a checksum has just read, `isfinite` 1 GB/s (measured).

    Args:
        data: bytes of the values.
        dtype: name of their dtype.
    """
    if dtype not in _INFINITY:
        return True
    size, infinity = _INFINITY[dtype]
    bits = np.frombuffer(data, f"<u{size}")
    if bits.view(f"<i{size}").max() >= infinity:
        return False
    sign = 1 << 8 * size - 1
    return bool(bits.max() < infinity + sign)


def _write_at(handle: int, data: memoryview, *, offset: int) -> None:
    while data:  # a write may stop short, at 2 GiB at the latest
        done = os.pwrite(handle, data, offset)
        data = data[done:]
        offset += done
