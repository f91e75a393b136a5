"""The `.idx` half of Megatron-LM's token files: dtype codes, header, layout.

    PREFIX.bin   token ids, one after the other, little endian, nothing else
    PREFIX.idx   b"MMIDIDX\\0\\0" | u64 version 1 | u8 dtype code
                 | u64 sequences n | u64 document indices d
                 | n int32 lengths in tokens | n int64 pointers in bytes
                 | d int64 first sequences of documents

The document indices begin with 0 and end with n, so d is the number of documents plus one.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain.errors import DataError
from nanotrain.quantities import count_of

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

_DTYPE_NAMES = ("uint8", "int8", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")
DTYPES = {code: np.dtype(name) for code, name in enumerate(_DTYPE_NAMES, start=1)}
CODES = {dtype: code for code, dtype in DTYPES.items()}

# bytes per checksum: 16 MB of checksums per TB; reading a block takes 0.1 ms
BLOCK_BYTES = 1 << 18

# Megatron-LM's bound, below 2**16, so that added tokens still fit.
UINT16_VOCAB = 65500


@dataclass(frozen=True)
class IndexHeader:
    """The header of an `.idx` file."""

    dtype: np.dtype[Any]
    num_sequences: int
    num_document_indices: int

    @property
    def file_bytes(self) -> int:
        """Size of the `.idx` file."""
        return HEADER.size + 12 * self.num_sequences + 8 * self.num_document_indices

    def pack(self) -> bytes:
        """The header as bytes."""
        return HEADER.pack(
            MAGIC, VERSION, CODES[self.dtype], self.num_sequences, self.num_document_indices
        )


def prefix_of(name: str) -> str:
    """The prefix of a `.bin/.idx` pair, of which one file may be named instead.

    >>> prefix_of("corpus.bin"), prefix_of("v1.5")
    ('corpus', 'v1.5')
    """
    return name[:-4] if name.endswith((".bin", ".idx")) else name


def bin_path(prefix: Path) -> Path:
    """Path of the token file."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Path of the index file."""
    return prefix.with_name(prefix.name + ".idx")


def mask_path(prefix: Path) -> Path:
    """Path of the loss mask, one byte per token: 1 for a target, 0 for a token only read."""
    return prefix.with_name(prefix.name + ".mask")


def sums_path(prefix: Path) -> Path:
    """Path of the checksums of the token file."""
    return sums_of(bin_path(prefix))


def sums_of(file: Path) -> Path:
    """Path of the checksums of a file of a corpus."""
    return file.with_name(file.name + ".crc32")


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """The token dtype `prepare` writes for a vocabulary: uint16 if it fits, else int32.

    >>> smallest_dtype(50257).name, smallest_dtype(128256).name
    ('uint16', 'int32')
    """
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB else np.dtype("<i4")


def check_dtype(dtype: np.dtype[Any], vocab_size: int) -> None:
    """Check that a token dtype can hold every id.

    Raises:
        DataError: it cannot hold the largest id.
    """
    largest = np.iinfo(dtype).max
    if vocab_size - 1 > largest:
        raise DataError(
            f"{dtype.name} cannot hold the ids of a vocabulary of {vocab_size}",
            why=f"the largest id is {vocab_size - 1}, the largest {dtype.name} is {largest}",
            fix="leave --dtype at auto",
        )


def read_header(path: Path, original: Path | None = None) -> IndexHeader:
    """Read and check the header of an `.idx` and the file's size.

    Args:
        path: the file.
        original: the file or object that it is a copy of, for errors.

    Raises:
        DataError: not an index, another version, a non-integer dtype, or a truncated file.
    """
    with path.open("rb") as file:
        start = file.read(HEADER.size)
    size = path.stat().st_size
    path = original or path
    if len(start) < HEADER.size or start[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path} is no Megatron-LM index",
            why=f"it begins with {start[: len(MAGIC)]!r}, an index with {MAGIC!r}",
            fix="give the prefix of files that `nanotrain prepare` or Megatron-LM wrote",
        )
    _, version, code, num_sequences, num_document_indices = HEADER.unpack(start)
    fix = "write the corpus again with `nanotrain prepare`"
    if version != VERSION:
        raise DataError(
            f"{path} is of index version {version}",
            why=f"only version {VERSION} is supported",
            fix=fix,
        )
    if code not in DTYPES or DTYPES[code].kind == "f":
        name = DTYPES[code].name if code in DTYPES else "unknown"
        why = "token ids are integers: codes 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16"
        raise DataError(f"{path} has tokens of dtype code {code} ({name})", why=why, fix=fix)
    header = IndexHeader(DTYPES[code], num_sequences, num_document_indices)
    if size != header.file_bytes:
        sequences = count_of(num_sequences, "sequence")
        raise DataError(
            f"{path} has {size} bytes where its header asks for {header.file_bytes}",
            why=(
                f"{sequences} and {num_document_indices} document indices; the copy is incomplete, "
                "or the file holds more than token sequences (multimodal)"
            ),
            fix="copy or prepare the corpus again",
        )
    return header
