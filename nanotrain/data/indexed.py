"""Read Megatron-LM `.bin/.idx` token files as one stream of tokens.

Index spaces:

    document d -> sequence s      first sequence of the document, from the .idx
    sequence s -> stream offset   tokens before it in the concatenated sequences
    stream offset -> byte         offset of the token in the .bin

`prepare` and Megatron-LM write contiguous sequences: a pointer divided by the token size is the
stream offset, and opening a corpus builds nothing. The format allows other pointers; such files are
detected when opened and read through a table of offsets, O(sequences) to build.

Tokens are read with `os.pread`: on cold files it is 4 to 6 times as fast as page faults through a
memory map (measured, windows of 2048 tokens), and it needs no file position. The `.idx` is
memory-mapped: its accesses are few and small.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from nanotrain.data.checksums import CHECKED_ON_OPENING, BlockCheck, fingerprint
from nanotrain.data.remote import ChunkCache, RemoteFile, open_file, whole_file
from nanotrain.data.token_format import (
    HEADER,
    bin_path,
    idx_path,
    mask_path,
    read_header,
    sums_of,
)
from nanotrain.errors import DataError
from nanotrain.quantities import count_of

# Up to _CHECK_ALL sequences every pointer is checked on opening (12 MB to read). Above, _CHECK_SOME
# evenly spread ones are checked, and the pointers of a window when it is read.
_CHECK_ALL = 1_000_000
_CHECK_SOME = 4096
_CHECK_INDEX_BYTES = 1 << 24  # an index of less is compared with all of its checksums, in 10 ms
_AGAIN = "copy or prepare the corpus again"
_SHOWN = 4  # number of pairs that are named where one is missing


class IndexedTokens:
    """The tokens of one `.bin/.idx` pair; cheap to pickle, each process opens the files itself.

    Args:
        prefix: path of the pair without `.bin` and `.idx`.
        cache: where the bytes of remote files are kept; None for the default.

    Raises:
        DataError: a file is missing, truncated or of another format, or the files do not match.
    """

    def __init__(self, prefix: Path | str, cache: ChunkCache | None = None) -> None:
        self.prefix = prefix if isinstance(prefix, Path) else Path(prefix)
        self.cache = cache
        self.bin_file = bin_path(self.prefix)
        tokens = open_file(self.bin_file, cache)
        index = open_file(idx_path(self.prefix), cache)
        if tokens is None or index is None:
            raise _missing_pair(self.prefix)
        self._tokens = tokens
        whole_index = whole_file(index)
        index_check = BlockCheck(whole_index, open_file(sums_of(index.path), cache))
        is_short = index.size <= _CHECK_INDEX_BYTES
        index_check.check(self.prefix, most=None if is_short else CHECKED_ON_OPENING)
        idx_file = whole_index.path
        header = read_header(idx_file, index.path)
        self.dtype = header.dtype
        self.num_sequences = header.num_sequences
        self._file_bytes = tokens.size
        if not self.num_sequences or not self._file_bytes:
            raise DataError(
                f"{self.prefix} is an empty corpus",
                why=f"it has {self.num_sequences} sequences and {self._file_bytes} bytes of tokens",
                fix="prepare it from files that contain text",
            )
        columns = np.memmap(idx_file, dtype=np.uint8, mode="r")[HEADER.size :]
        lengths_end, pointers_end = 4 * self.num_sequences, 12 * self.num_sequences
        self._lengths = columns[:lengths_end].view("<i4")
        self._pointers = columns[lengths_end:pointers_end].view("<i8")
        self._documents = columns[pointers_end:].view("<i8")
        self._check_documents()
        self._check_size()
        self.mask_file = open_file(mask_path(self.prefix), cache)
        if self.mask_file is not None and self.mask_file.size != self.num_tokens:
            why = f"it has {self.mask_file.size:,} bytes, and the corpus {self.num_tokens:,} tokens"
            raise DataError(f"{self.mask_file.path} does not match", why=why, fix=_AGAIN)
        self._check = BlockCheck(tokens, open_file(sums_of(tokens.path), cache))
        self._check.check(self.prefix, most=CHECKED_ON_OPENING)
        checks = [self._check, index_check]
        if self.mask_file is not None:
            sums = open_file(sums_of(self.mask_file.path), cache)
            self._mask_check = BlockCheck(self.mask_file, sums)
            self._mask_check.check(self.prefix, most=CHECKED_ON_OPENING)
            checks.append(self._mask_check)
        # files in which damage is not noticed
        self.unchecked = [check.file.path.name for check in checks if not check.has_sums]

    def __reduce__(self) -> tuple[type, tuple[Path, ChunkCache | None]]:
        return IndexedTokens, (self.prefix, self.cache)

    @property
    def is_remote(self) -> bool:
        """Whether the corpus is in object storage."""
        return isinstance(self._tokens, RemoteFile)

    @cached_property
    def fingerprint(self) -> str:
        """Digits that differ where the corpus does, see `checksums.fingerprint`."""
        return fingerprint(self.prefix, self.cache)

    @property
    def num_documents(self) -> int:
        """Documents in the corpus."""
        return len(self._documents) - 1

    @cached_property
    def num_tokens(self) -> int:
        """Tokens in the corpus."""
        return self._sequence_start(self.num_sequences)

    def document_start(self, document: int) -> int:
        """Stream offset of a document's first token; of the end for `document == num_documents`."""
        return self._sequence_start(int(self._documents[document]))

    def documents_in(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The documents with tokens in [start, stop) of the stream: (index, start, stop) each."""
        document = bisect_right(range(self.num_documents), start, key=self.document_start) - 1
        while start < stop:
            end = min(stop, self.document_start(document + 1))
            if start < end:  # not an empty document
                yield document, start, end
            start = max(start, end)
            document += 1

    def byte_of(self, position: int) -> int:
        """The offset in the .bin of a token of the stream."""
        sequence = bisect_right(range(self.num_sequences), position, key=self._sequence_start) - 1
        offset = position - self._sequence_start(sequence)
        return int(self._pointers[sequence]) + offset * self.dtype.itemsize

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Stream offsets in [start, stop) at which documents begin, ascending, int64."""
        documents = range(self.num_documents)
        first = bisect_left(documents, start, key=self.document_start)
        last = bisect_left(documents, stop, lo=first, key=self.document_start)
        self._check_order(np.arange(max(0, first - 1), min(last + 1, self.num_documents)))
        starts = [self.document_start(document) for document in range(first, last)]
        return np.unique(starts).astype(np.int64)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, in the file's dtype.

        Raises:
            DataError: a range outside the stream, a file truncated after it was opened, or pointers
                that are not contiguous.
        """
        if not 0 <= start < stop <= self.num_tokens:
            raise DataError(
                f"tokens [{start}, {stop}) of {self.prefix} cannot be read",
                why=f"the corpus has tokens [0, {self.num_tokens})",
                fix="read a range inside it",
            )
        first = bisect_right(range(self.num_sequences), start, key=self._sequence_start) - 1
        last = bisect_left(range(self.num_sequences), stop, lo=first, key=self._sequence_start)
        if self._offsets is None:
            self._check_window(first, last)
            return self._pread(start * self.dtype.itemsize, stop - start)
        parts = []
        for sequence in range(first, last):
            sequence_start = self._sequence_start(sequence)
            sequence_stop = sequence_start + int(self._lengths[sequence])
            skipped = max(0, start - sequence_start)
            count = min(stop, sequence_stop) - sequence_start - skipped
            if count > 0:
                offset = int(self._pointers[sequence]) + skipped * self.dtype.itemsize
                parts.append(self._pread(offset, count))
        return np.concatenate(parts)

    def read_mask(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] uint8, 1 for tokens that are targets; all 1 without a loss mask.

        Raises:
            DataError: a block is damaged, or a value is neither 0 nor 1.
        """
        if self.mask_file is None:
            return np.ones(stop - start, dtype=np.uint8)
        damaged = self._mask_check.damaged(start, stop)
        if damaged is not None:
            raise self._damaged_block(self.mask_file.path, damaged, token=start)
        mask = np.frombuffer(self.mask_file.read(start, stop), dtype=np.uint8)
        wrong = np.flatnonzero(mask > 1)
        if wrong.size:
            raise DataError(
                f"{self.mask_file.path} has {mask[wrong[0]]} at token {start + wrong[0]:,}",
                why="a loss mask has 1 for a target, and 0 for a token that is only read",
                fix="copy or prepare the corpus again; a mask has no weights",
            )
        return mask

    def _sequence_start(self, sequence: int) -> int:
        """Stream offset of a sequence; of the end for `num_sequences`."""
        if self._offsets is not None:
            return int(self._offsets[sequence])
        if sequence == self.num_sequences:
            return self._file_bytes // self.dtype.itemsize
        return int(self._pointers[sequence]) // self.dtype.itemsize

    @cached_property
    def _offsets(self) -> np.ndarray | None:
        """Stream offset of every sequence and of the end; None if the sequences are contiguous."""
        if self._is_contiguous():
            return None
        return np.concatenate(([0], np.cumsum(self._lengths, dtype=np.int64)))

    def _is_contiguous(self) -> bool:
        """Whether sequences lie one after another and fill the file."""
        last = self.num_sequences - 1
        end = int(self._pointers[last]) + int(self._lengths[last]) * self.dtype.itemsize
        if self._pointers[0] != 0 or end != self._file_bytes:
            return False
        checked = _to_check(last)
        return self._are_adjacent(checked) and bool(np.all(np.diff(self._pointers[checked]) >= 0))

    def _are_adjacent(self, sequences: np.ndarray) -> bool:
        """Whether each sequence ends where the next one begins."""
        num_bytes = self._lengths[sequences].astype(np.int64) * self.dtype.itemsize
        ends = self._pointers[sequences] + num_bytes
        return bool(np.array_equal(self._pointers[sequences + 1], ends))

    def _pread(self, offset: int, count: int) -> np.ndarray:
        """Read `count` tokens at a byte offset, after the checksums of their blocks."""
        num_bytes = count * self.dtype.itemsize
        damaged = self._check.damaged(offset, offset + num_bytes)
        if damaged is not None:
            token = offset // self.dtype.itemsize
            raise self._damaged_block(self.bin_file, damaged, token=token)
        data = self._tokens.read(offset, offset + num_bytes)
        if len(data) < num_bytes:
            raise DataError(
                f"{self.bin_file} ended at byte {offset + len(data)}",
                why=f"it had {self._file_bytes} bytes when it was opened",
                fix="do not overwrite a corpus while a run reads it",
            )
        return np.frombuffer(data, dtype=self.dtype)

    def _damaged_block(self, file: Path, first_byte: int, *, token: int) -> DataError:
        """The error for a block that differs from its checksum, and a token that is read there."""
        document, *_ = next(self.documents_in(token, self.num_tokens))
        return DataError(
            f"{file} is not as it was written",
            why=(
                f"its block from byte {first_byte:,} on differs from its checksum; "
                f"document {document} is read there"
            ),
            fix=(
                "copy or prepare the corpus again; "
                f"`nanotrain prepare --verify {self.prefix}` checks all blocks"
            ),
        )

    def _check_documents(self) -> None:
        """Check the document index: from 0, ascending, to the number of sequences."""
        ends: list[int] = []
        if len(self._documents) > 1:
            ends = [int(self._documents[0]), int(self._documents[-1])]
        if ends != [0, self.num_sequences]:
            raise self._damaged(
                f"its document indices run over {ends or 'nothing'}",
                why=(
                    "they must begin with 0 and end with the number of sequences, "
                    f"{self.num_sequences}"
                ),
            )
        self._check_order(_to_check(self.num_documents))

    def _check_order(self, documents: np.ndarray) -> None:
        """Check that the documents begin in ascending order, or their borders would be wrong."""
        falls = self._documents[documents + 1] < self._documents[documents]
        if falls.any():
            document = int(documents[falls.argmax()])
            first, after = self._documents[document : document + 2]
            raise self._damaged(
                f"document {document} begins with sequence {first}",
                why=f"the next one begins with sequence {after}, which is earlier",
            )

    def _check_size(self) -> None:
        """Check that sequences that are not contiguous cover the .bin."""
        if self._offsets is None:
            return
        itemsize = self.dtype.itemsize
        pointers = self._pointers
        lengths = self._lengths.astype(np.int64)
        bad = (lengths < 0) | (pointers < 0) | (pointers % itemsize != 0)
        if bad.any():
            sequence = int(bad.argmax())
            length, pointer = lengths[sequence], pointers[sequence]
            raise self._damaged(
                f"sequence {sequence} has length {length} and pointer {pointer}",
                why=f"neither is negative, and pointers are multiples of {itemsize} bytes",
            )
        needed = int(lengths.sum()) * itemsize
        if needed != self._file_bytes:
            sequences = count_of(self.num_sequences, "sequence")
            raise DataError(
                f"{self.bin_file} has {self._file_bytes} bytes where its index asks for {needed}",
                why=(
                    f"{sequences} of {self.dtype.name} tokens; the copy is incomplete, "
                    "or the .idx belongs to another .bin"
                ),
                fix=_AGAIN,
            )
        order = np.lexsort((lengths, pointers))  # storage order: sequences may lie in any order
        starts = pointers[order]
        ends = starts + lengths[order] * itemsize
        expected = np.concatenate(([0], ends[:-1]))
        if not np.array_equal(starts, expected):
            sequence = int(order[(starts != expected).argmax()])
            what = f"its sequences overlap or leave gaps at sequence {sequence}"
            raise self._damaged(what, why="every token of the .bin belongs to one sequence")

    def _check_window(self, first: int, last: int) -> None:
        """Check that the sequences of a window are contiguous in the file."""
        if not self._are_adjacent(np.arange(first, min(last, self.num_sequences - 1))):
            raise self._damaged(
                f"its pointers are out of order near sequence {first}",
                why=(
                    "those checked on opening are contiguous, these are not, "
                    "so offsets would be wrong"
                ),
            )

    def _damaged(self, what: str, *, why: str) -> DataError:
        return DataError(f"{idx_path(self.prefix)} is damaged: {what}", why=why, fix=_AGAIN)


def _to_check(number: int) -> np.ndarray:
    """The indices below `number` that are checked on opening: all, or evenly spread ones."""
    if number <= _CHECK_ALL:
        return np.arange(number)
    return np.linspace(0, number - 1, _CHECK_SOME).astype(np.int64)


def _missing_pair(prefix: Path) -> DataError:
    """The error for a prefix without .bin or .idx: the kind of the path, and the command to run.

    --data-path story.txt       a text: prepare it
    --data-path folder          a folder: its pairs, or prepare the texts in it
    --data-path folder/pre      neither: the pairs in the folder, if there are any
    """
    missing, other = sorted((idx_path(prefix), bin_path(prefix)), key=Path.is_file)
    is_folder = prefix.is_dir()
    folder = prefix if is_folder else prefix.parent
    pairs = []
    if not other.is_file() and not prefix.is_file():
        pairs = [str(path.with_suffix("")) for path in sorted(folder.glob("*.idx"))]
    if other.is_file():
        why = f"{other.name} is there"
        fix = "check the path, or copy the missing file"
    elif pairs:
        why = f"the folder {folder} has {', '.join(pairs[:_SHOWN])}"
        fix = f"write for example --data-path {pairs[0]}"
    elif prefix.exists():
        output = prefix.with_name(f"{prefix.name}-tokens") if is_folder else prefix.with_suffix("")
        command = f"nanotrain prepare --input {prefix} --output {output} --tokenizer bpe:8192"
        why = f"{prefix} is a {'folder' if is_folder else 'file'}"
        fix = f"make token files: {command}, then train with --data-path {output}"
    else:
        why = f"{other.name} is missing too"
        fix = "check the path, or write the pair with `nanotrain prepare`"
    return DataError(
        f"{missing} does not exist",
        why=f"--data-path names prefixes of .bin/.idx pairs; {why}",
        fix=fix,
    )
