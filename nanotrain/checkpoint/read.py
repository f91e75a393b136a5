"""Reading: opens each needed shard once, checks every piece it reads, and copies the parts that were asked for.

    ShardFile    one safetensors file: where each key lies
    fill         carries out the reads of `plan_reads`, file after file, the pieces of a file in parallel
    read_full    whole tensors, one at a time, for exports

A piece is read whole even when a part of it is wanted: its checksum covers the whole, and an unchecked element would be
the one that is wrong. Pieces are at most `plan.PIECE_BYTES` long, which bounds the excess. Plain `preadv` instead of a
memory map: measured 2.4 GB/s against 0.9 cold, because page faults get no read-ahead.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from nanotrain.checkpoint.manifest import Manifest, PieceEntry
from nanotrain.checkpoint.plan import PieceRead, plan_reads
from nanotrain.checkpoint.store import read_manifest
from nanotrain.checkpoint.write import DTYPES, SAFETENSORS_NAMES, THREADS, raw_bytes
from nanotrain.errors import CheckpointError
from nanotrain.topology.boxes import Box, TensorBox


class ShardFile:
    """An open shard of a checkpoint.

    Args:
        path: the safetensors file.

    Raises:
        CheckpointError: it is missing or has no readable header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise _damaged(f"{path} cannot be opened", str(error.strerror)) from None
        try:
            self._header, self._begin = self._read_header()
        except BaseException:
            os.close(self._handle)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)

    def read(self, piece: PieceEntry, dtype: str, *, into: torch.Tensor) -> None:
        """Fill a contiguous host tensor of the piece's shape and dtype with it.

        Raises:
            CheckpointError: the file ends early, or the bytes have another checksum than the manifest says.
        """
        entry = self._header.get(piece.key)
        if entry is None:
            raise _damaged(f"piece {piece.key} is damaged", f"{self.path} does not hold it")
        start, stop = entry["data_offsets"]
        shape, kind = tuple(entry["shape"]), entry["dtype"]
        if (shape, kind, stop - start) != (piece.box.shape, SAFETENSORS_NAMES[dtype], piece.nbytes):
            raise _damaged(
                f"piece {piece.key} is damaged",
                f"{self.path} holds it as {kind} {list(shape)}, the manifest as {dtype} {list(piece.box.shape)}",
            )
        data = raw_bytes(into)
        done = 0
        while done < piece.nbytes and (count := os.preadv(self._handle, [data[done:]], self._begin + start + done)):
            done += count
        if done < piece.nbytes:
            raise _damaged(f"piece {piece.key} is damaged", f"{self.path} ends {piece.nbytes - done} bytes too early")
        if (present := f"{zlib.crc32(data):08x}") != piece.crc32:
            raise _damaged(
                f"piece {piece.key} is damaged",
                f"its bytes in {self.path} have crc32 {present}, the manifest says {piece.crc32}",
            )

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = os.fstat(self._handle).st_size
        length = int.from_bytes(os.pread(self._handle, 8, 0), "little")
        if not 2 <= length <= size - 8:
            raise _damaged(f"{self.path} is damaged", f"it claims a header of {length} bytes and has {size} in all")
        try:
            return json.loads(os.pread(self._handle, length, 8)), 8 + length
        except ValueError as error:
            raise _damaged(f"{self.path} is damaged", f"its header is no JSON ({error})") from None


def fill(folder: Path, reads: Mapping[str, tuple[PieceRead, ...]], *, wanted: Mapping[TensorBox, torch.Tensor]) -> None:
    """Read pieces and copy what is wanted of them into the given tensors, in place.

    Args:
        folder: of the checkpoint.
        reads: from `plan_reads`.
        wanted: box -> tensor of the box's shape, on any device; of another float dtype, elements are rounded to it.

    Raises:
        CheckpointError: a piece is damaged; some tensors are then half filled and must not be used.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        for file, pieces in reads.items():
            with ShardFile(folder / file) as shard:
                list(pool.map(lambda read, shard=shard: _fill_one(shard, read, wanted=wanted), pieces))


def read_full(path: Path, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors of a checkpoint, in the order asked for, one in memory at a time.

    Args:
        path: a complete step folder.
        names: as in the manifest ("model/final_norm.weight").

    Yields:
        The name and the tensor, in the dtype it was saved in, on the CPU.

    Raises:
        CheckpointError: no such tensor, or a piece of it is damaged.
    """
    manifest = read_manifest(path)
    for name in names:
        yield name, _read_one(path, manifest, name=name)


def _read_one(path: Path, manifest: Manifest, *, name: str) -> torch.Tensor:
    entry = manifest.tensors.get(name)
    if entry is None:
        raise CheckpointError(
            f"{path} holds no tensor {name}",
            why=f"it holds {len(manifest.tensors)} others, the first is {next(iter(manifest.tensors), 'none')}",
            fix="`nanotrain checkpoint inspect` lists them",
        )
    box = TensorBox(name, entry.shape, Box.full(entry.shape))
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    fill(path, plan_reads(manifest, [box]), wanted={box: tensor})
    return tensor


def _fill_one(shard: ShardFile, read: PieceRead, *, wanted: Mapping[TensorBox, torch.Tensor]) -> None:
    shape, dtype = read.piece.box.shape, DTYPES[read.dtype]
    parts = [wanted[copy.wanted].detach()[copy.target.slices()] for copy in read.fills]
    direct = parts[0] if len(parts) == 1 else None
    whole = direct is not None and direct.shape == shape and direct.is_contiguous()
    if direct is not None and whole and direct.dtype == dtype and direct.device.type == "cpu":
        shard.read(read.piece, read.dtype, into=direct)  # the layout did not change: straight into its place
        return
    piece = torch.empty(shape, dtype=dtype)
    shard.read(read.piece, read.dtype, into=piece)
    for copy, part in zip(read.fills, parts, strict=True):
        part.copy_(piece[copy.source.slices()])


def _damaged(what: str, why: str) -> CheckpointError:
    return CheckpointError(what, why=why, fix="load an older checkpoint of the run")
