"""Checksums of a corpus: `FILE.crc32` has the CRC-32 of every block of FILE, four bytes each.

    BlockSums       the checksums of what `nanotrain prepare` writes: .bin, .idx and .mask
    check_blocks    some blocks when a corpus is opened, in a time that does not depend on its
                    size; all for `--verify`
    BlockCheck      every block when a process first reads it
    fingerprint     a short identification of a corpus, for checkpoints

Files without checksums, such as Megatron-LM's, are not checked; a start names them.
"""

from pathlib import Path
from zlib import crc32

import numpy as np

from nanotrain.data.remote import ChunkCache, CorpusFile, open_file, require_file
from nanotrain.data.token_format import BLOCK_BYTES, bin_path, idx_path, mask_path, sums_of
from nanotrain.errors import DataError

CHECKED_ON_OPENING = 3
NO_MASK = "00000000"  # in the place of the fingerprint of a mask


class BlockSums:
    """The checksums of a stream of bytes."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        # checksum and size of the last, incomplete block
        self._crc32 = 0
        self._size = 0

    def add(self, data: memoryview | bytes) -> None:
        """Add the next bytes."""
        data = memoryview(data).cast("B")
        while data:
            part = data[: BLOCK_BYTES - self._size]
            data = data[len(part) :]
            self._crc32 = crc32(part, self._crc32)
            self._size += len(part)
            if self._size == BLOCK_BYTES:
                self._sums.append(self._crc32)
                self._crc32 = 0
                self._size = 0

    def to_bytes(self) -> bytes:
        """The content of the file."""
        sums = list(self._sums)
        if self._size:
            sums.append(self._crc32)
        return np.array(sums, dtype="<u4").tobytes()


def check_blocks(prefix: Path) -> dict[Path, int]:
    """Compare all blocks of a corpus with their checksums.

    Returns:
        The number of blocks of each file; 0 for one without checksums.

    Raises:
        DataError: a block differs.
    """
    checked = {}
    for path in (bin_path(prefix), idx_path(prefix), mask_path(prefix)):
        file = open_file(path)
        if file is not None:
            checked[path] = BlockCheck(file, open_file(sums_of(path))).check(prefix)
    return checked


class BlockCheck:
    """Compares blocks of a file of a corpus with their checksums.

    Args:
        file: the file.
        sums: its checksums; without them nothing is compared.
    """

    def __init__(self, file: CorpusFile, sums: CorpusFile | None) -> None:
        self.file = file
        self.sums = np.empty(0, dtype="<u4")
        self.has_sums = sums is not None
        if sums is not None and sums.size >= 4:
            self.sums = np.memmap(sums.local, dtype="<u4", mode="r", shape=sums.size // 4)
        self._is_checked = np.zeros(len(self.sums), dtype=bool)

    def check(self, prefix: Path, *, most: int | None = None) -> int:
        """Compare `most` evenly spread blocks, or all; returns their number.

        Raises:
            DataError: a block differs.
        """
        if not self.has_sums:
            return 0
        total = -(-self.file.size // BLOCK_BYTES)
        sums_name = sums_of(self.file.path).name
        if len(self.sums) != total:
            why = f"it has {total} blocks, {sums_name} has checksums of {len(self.sums)}"
            raise self._damaged_file(prefix, why)
        numbers = range(total) if most is None else _spread(total, most)
        bad = [block for block in numbers if not self._is_sound(block)]
        if bad:
            first_byte = bad[0] * BLOCK_BYTES
            blocks = f"{len(bad)} of {len(numbers)} checked blocks"
            why = f"{blocks} differ from {sums_name}, the first from byte {first_byte:,} on"
            raise self._damaged_file(prefix, why)
        return len(numbers)

    def _damaged_file(self, prefix: Path, why: str) -> DataError:
        """The error for a file that differs from its checksums."""
        return DataError(
            f"{self.file.path} is not as it was written",
            why=why,
            fix=(
                "copy or prepare the corpus again; "
                f"`nanotrain prepare --verify {prefix}` checks all blocks"
            ),
        )

    def damaged(self, start: int, stop: int) -> int | None:
        """The first byte of the first damaged block that holds bytes [start, stop), or None.

        A block is compared once per process, which takes 0.1 ms, hidden by the step where workers
        load the data.
        """
        last = min(-(-stop // BLOCK_BYTES), len(self.sums))
        for block in range(start // BLOCK_BYTES, last):
            if self._is_checked[block]:
                continue
            if not self._is_sound(block):
                return block * BLOCK_BYTES
            self._is_checked[block] = True
        return None

    def _is_sound(self, number: int) -> bool:
        """Whether a block has its checksum, if need be after a cached block is fetched again."""
        while crc32(_read_block(self.file, number)) != self.sums[number]:
            if not self.file.drop(number * BLOCK_BYTES):
                return False
        return True


def fingerprint(prefix: Path, cache: ChunkCache | None = None) -> str:
    """Sixteen hexadecimal digits that differ between corpora: eight, a hyphen, eight of the mask.

    They follow from the sizes, the ends of the index and the checksums. Without checksums, as in
    Megatron-LM's corpora, evenly spread blocks stand for all of them. Older versions wrote the
    first eight alone.
    """
    value = 0
    for path in (bin_path(prefix), idx_path(prefix)):
        value = _add_blocks(require_file(path, cache), value)
    for path in (bin_path(prefix), idx_path(prefix)):
        value = _add_sums(path, value, cache=cache)
    mask = open_file(mask_path(prefix), cache)
    if mask is None:
        return f"{value:08x}-{NO_MASK}"
    mask_value = _add_sums(mask_path(prefix), _add_blocks(mask, 0), cache=cache)
    return f"{value:08x}-{mask_value:08x}"


def _add_blocks(file: CorpusFile, value: int) -> int:
    """The CRC-32 that goes on with the size and evenly spread blocks of a file."""
    value = crc32(file.size.to_bytes(8, "little"), value)
    num_blocks = -(-file.size // BLOCK_BYTES)
    for block in _spread(num_blocks, CHECKED_ON_OPENING):
        value = crc32(_read_block(file, block), value)
    return value


def _add_sums(path: Path, value: int, *, cache: ChunkCache | None) -> int:
    """Continue a CRC-32 with the stored checksums of a file, if the file has them."""
    sums = open_file(sums_of(path), cache)
    return value if sums is None else crc32(sums.local.read_bytes(), value)


def is_same_corpus(saved: str, now: str) -> bool:
    """Whether two fingerprints are of one corpus; older versions' fingerprints leave out the mask.

    >>> is_same_corpus("0badcafe", "0badcafe-12345678")
    True
    """
    return now.startswith(f"{saved}-") if "-" not in saved else saved == now


def _spread(total: int, most: int) -> list[int]:
    """At most `most` evenly spread numbers below `total`."""
    return sorted({*np.linspace(0, total - 1, most).astype(int).tolist()})


def _read_block(file: CorpusFile, number: int) -> bytes:
    return file.read(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)
