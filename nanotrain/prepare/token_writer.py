"""Write Megatron-LM `.bin/.idx` token files, one sequence per document.

Both files are written under temporary names that no other process has, and renamed when they are
complete and synced to disk. An older pair stays until then.
"""

import os
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nanotrain.data.checksums import BlockSums
from nanotrain.data.token_format import (
    HEADER,
    IndexHeader,
    bin_path,
    idx_path,
    mask_path,
    read_header,
    sums_of,
)

_COPY_BYTES = 1 << 22


class TokenWriter(AbstractContextManager["TokenWriter"]):
    """Writes the pair `prefix`.bin and .idx; an exception in the block leaves the older pair.

    Args:
        prefix: path of the pair without `.bin` and `.idx`; an existing pair is replaced.
        dtype: dtype of the tokens.
        scratch: folder of the temporary files, on the same file system; a killed writer leaves them
            there. None for the folder of the pair.
        has_mask: whether a loss mask is written with the tokens, `prefix`.mask.
    """

    def __init__(
        self,
        prefix: Path | str,
        dtype: np.dtype[Any],
        *,
        scratch: Path | None = None,
        has_mask: bool = False,
    ) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        folder = scratch or self.prefix.parent
        token = secrets.token_hex(4)

        def partial(suffix: str) -> Path:
            return folder / f".{self.prefix.name}.{suffix}.{token}.partial"

        self._partial_tokens = partial("bin")
        self._partial_index = partial("idx")
        self._partial_mask = partial("mask")
        self._lengths: list[np.ndarray] = []
        # documents and tokens written so far
        self.num_documents = 0
        self.num_tokens = 0
        self._sums = {path(self.prefix): BlockSums() for path in (bin_path, idx_path, mask_path)}
        self._file = self._partial_tokens.open("xb")
        self._mask = self._partial_mask.open("xb") if has_mask else None
        self._is_complete = False

    def add_documents(
        self, documents: Sequence[Sequence[int]], masks: Sequence[np.ndarray] = ()
    ) -> None:
        """Append documents.

        Args:
            documents: token ids, with the end-of-document token.
            masks: [tokens] uint8 per document, if a loss mask is written.
        """
        lengths = np.fromiter(map(len, documents), dtype="<i4", count=len(documents))
        ids = chain.from_iterable(documents)
        self._write(np.fromiter(ids, dtype=self.dtype, count=lengths.sum()).data)
        self._add_lengths(lengths)
        if self._mask is not None:
            assert list(map(len, masks)) == lengths.tolist(), (
                "every document has a mask of its length"
            )
            self._write_mask(b"".join(mask.astype(np.uint8).data for mask in masks))

    def append_pair(self, prefix: Path) -> None:
        """Append every sequence of another pair as a document; the pair may be empty."""
        header = read_header(idx_path(prefix))
        assert header.dtype == self.dtype, f"{prefix} holds {header.dtype}, not {self.dtype}"
        with idx_path(prefix).open("rb") as index:
            index.seek(HEADER.size)
            self._add_lengths(np.fromfile(index, dtype="<i4", count=header.num_sequences))
        with bin_path(prefix).open("rb") as tokens:
            while data := tokens.read(_COPY_BYTES):
                self._write(data)
        if self._mask is not None:
            with mask_path(prefix).open("rb") as mask:
                while data := mask.read(_COPY_BYTES):
                    self._write_mask(data)

    def _write(self, data: memoryview | bytes) -> None:
        self._file.write(data)
        self._sums[bin_path(self.prefix)].add(data)

    def _write_mask(self, data: bytes) -> None:
        """Append to the mask file and to its checksums."""
        assert self._mask is not None, "callers check it"
        self._mask.write(data)
        self._sums[mask_path(self.prefix)].add(data)

    def _add_lengths(self, lengths: np.ndarray) -> None:
        """Add the lengths of documents to the index and to the counts."""
        self._lengths.append(lengths)
        self.num_documents += len(lengths)
        self.num_tokens += int(lengths.sum(dtype=np.int64))

    def complete(self) -> None:
        """Write the index and sync all files, still under their temporary names.

        Nothing may be added afterwards.
        """
        if self._is_complete:
            return
        _sync(self._file)
        if self._mask is not None:
            _sync(self._mask)
        with self._partial_index.open("xb") as file:
            self._write_index(file)
            _sync(file)
        self._is_complete = True

    def checksums(self) -> dict[Path, bytes]:
        """The content of the file of checksums of each file, by its path; after `complete`."""
        assert self._is_complete, "the index is written last"
        names = [bin_path(self.prefix), idx_path(self.prefix)]
        if self._mask is not None:
            names.append(mask_path(self.prefix))
        return {sums_of(name): self._sums[name].to_bytes() for name in names}

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.complete()
                self._rename()
        finally:
            self._close()

    def _rename(self) -> None:
        """Give the files their names, the index last: it never stands with other tokens."""
        idx_path(self.prefix).unlink(missing_ok=True)
        mask_path(self.prefix).unlink(missing_ok=True)
        if self._mask is None:
            sums_of(mask_path(self.prefix)).unlink(missing_ok=True)
        os.replace(self._partial_tokens, bin_path(self.prefix))
        if self._mask is not None:
            os.replace(self._partial_mask, mask_path(self.prefix))
        os.replace(self._partial_index, idx_path(self.prefix))

    def _close(self) -> None:
        """Close the files, and remove temporary ones that are left."""
        for file in (self._file, self._mask):
            if file is not None:
                with suppress(OSError):  # a full disk: closing writes the buffers
                    file.close()
        for partial in (self._partial_tokens, self._partial_index, self._partial_mask):
            partial.unlink(missing_ok=True)

    def _write_index(self, file: BinaryIO) -> None:
        """Write the index as Megatron-LM does: header, lengths, byte offsets, document bounds."""
        lengths = np.concatenate([np.empty(0, dtype="<i4"), *self._lengths])
        count = len(lengths)
        ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        pointers = np.concatenate([np.zeros(1, dtype="<i8"), ends[:-1]])[:count]
        header = IndexHeader(self.dtype, count, count + 1).pack()
        parts: list[bytes | memoryview] = [header]
        for column in (lengths, pointers, np.arange(count + 1, dtype="<i8")):
            parts.append(column.data)
        for part in parts:
            file.write(part)
            self._sums[idx_path(self.prefix)].add(part)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
