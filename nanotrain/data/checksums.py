"""Checksums of token files: `PREFIX.bin.crc32` has the CRC-32 of every block of a `.bin`, four bytes each.

    BlockSums       of what `nanotrain prepare` writes
    check_blocks    some blocks when a corpus is opened, which takes the same time for any size; all for `--verify`
    BlockCheck      every block when a process first reads it
    fingerprint     of a corpus, for checkpoints

Corpora without the file, such as Megatron-LM's, are not checked.
"""

import os
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import numpy as np

from nanotrain.data.token_format import bin_path, idx_path
from nanotrain.errors import DataError

BLOCK_BYTES = 1 << 18  # 16 MB of checksums per TB; reading a block takes 0.1 ms
CHECKED_ON_OPENING = 3


def sums_path(prefix: Path) -> Path:
    """Path of the checksums of a pair."""
    return prefix.with_name(prefix.name + ".bin.crc32")


class BlockSums:
    """The checksums of a stream of bytes."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._crc32 = self._size = 0  # of the last, incomplete block

    def add(self, data: memoryview | bytes) -> None:
        """Add the next bytes."""
        data = memoryview(data).cast("B")
        while data:
            part = data[: BLOCK_BYTES - self._size]
            self._crc32, self._size, data = crc32(part, self._crc32), self._size + len(part), data[len(part) :]
            if self._size == BLOCK_BYTES:
                self._sums.append(self._crc32)
                self._crc32 = self._size = 0

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return np.array(self._sums + [self._crc32] * bool(self._size), dtype="<u4").tobytes()


def check_blocks(prefix: Path, *, most: int | None = None) -> int:
    """Compare blocks of a token file with their checksums.

    Args:
        prefix: path of the pair.
        most: number of evenly spread blocks to check; None for all.

    Returns:
        The number of blocks checked; 0 if the corpus has no checksums.

    Raises:
        DataError: a block differs.
    """
    file, path = bin_path(prefix), sums_path(prefix)
    if not path.is_file():
        return 0
    sums = np.memmap(path, dtype="<u4", mode="r") if path.stat().st_size else np.empty(0, dtype="<u4")
    total = -(-file.stat().st_size // BLOCK_BYTES)
    what, why = f"{file} is not as it was written", f"it has {total} blocks, {path.name} has checksums of {len(sums)}"
    if len(sums) == total:
        numbers = range(total) if most is None else sorted({*np.linspace(0, total - 1, most).astype(int).tolist()})
        with file.open("rb") as blocks:
            bad = [number for number in numbers if crc32(_block(blocks, number)) != sums[number]]
        if not bad:
            return len(numbers)
        begin = bad[0] * BLOCK_BYTES
        why = f"{len(bad)} of {len(numbers)} checked blocks differ from {path.name}, the first from byte {begin:,} on"
    fix = f"copy or prepare the corpus again; `nanotrain prepare --verify {prefix}` checks all blocks"
    raise DataError(what, why=why, fix=fix)


class BlockCheck:
    """Compares blocks of an open token file with their checksums, each once per process.

    A block takes 0.1 ms, beside the step where workers load the data.

    Args:
        prefix: path of the pair; without checksums nothing is compared.
        descriptor: open .bin.
    """

    def __init__(self, prefix: Path, descriptor: int) -> None:
        path = sums_path(prefix)
        self._sums = np.fromfile(path, dtype="<u4") if path.is_file() else np.empty(0, dtype="<u4")
        self._is_checked, self._descriptor = np.zeros(len(self._sums), dtype=bool), descriptor

    def damaged(self, start: int, stop: int) -> int | None:
        """The first byte of the first damaged block among those that hold bytes [start, stop); None without one."""
        for number in range(start // BLOCK_BYTES, min(-(-stop // BLOCK_BYTES), len(self._sums))):
            if not self._is_checked[number]:
                block = os.pread(self._descriptor, BLOCK_BYTES, number * BLOCK_BYTES)
                if crc32(block) != self._sums[number]:
                    return number * BLOCK_BYTES
                self._is_checked[number] = True
        return None


def fingerprint(prefix: Path) -> str:
    """Eight hexadecimal digits that differ between corpora: of the sizes, the index's ends and the checksums.

    Without checksums, as of Megatron-LM's corpora, evenly spread blocks of the tokens stand for all of them.
    """
    files, value = (bin_path(prefix), idx_path(prefix)), 0
    for path in files:
        with path.open("rb") as blocks:
            total = -(-path.stat().st_size // BLOCK_BYTES)
            value = crc32(path.stat().st_size.to_bytes(8, "little"), value)
            for number in sorted({*np.linspace(0, total - 1, CHECKED_ON_OPENING).astype(int).tolist()}):
                value = crc32(_block(blocks, number), value)
    sums = sums_path(prefix)
    return f"{crc32(sums.read_bytes(), value) if sums.is_file() else value:08x}"


def _block(file: BinaryIO, number: int) -> bytes:
    file.seek(number * BLOCK_BYTES)
    return file.read(BLOCK_BYTES)
