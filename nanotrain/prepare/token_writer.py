"""Write Megatron-LM `.bin/.idx` token files, one sequence per document.

Both files are written under temporary names that no other process has, and renamed when they are
complete and synced to disk. An older pair stays until then.
"""

import os
import secrets
import shutil
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
)

_COPY_BYTES = 1 << 22


class TokenWriter(AbstractContextManager["TokenWriter"]):
    """Writes the pair `prefix`.bin and .idx, as a context manager; after an exception inside, the
    older pair is left.

    Args:
        prefix: path of the pair without `.bin` and `.idx`; an existing pair is replaced.
        dtype: dtype of the tokens.
        scratch: folder of the temporary files, on the same file system; a killed writer leaves them
            there. None for the folder of the pair.
        has_mask: whether a loss mask is written beside the tokens, `prefix`.mask.
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
        folder, token = scratch or self.prefix.parent, secrets.token_hex(4)
        self._partials = [
            folder / f".{self.prefix.name}.{suffix}.{token}.partial"
            for suffix in ("bin", "idx", "mask")
        ]
        self._lengths: list[np.ndarray] = []
        self.num_documents = self.num_tokens = 0  # written so far
        self.sums = BlockSums()  # of the tokens written so far
        self._file = self._partials[0].open("xb")
        self._mask = self._partials[2].open("xb") if has_mask else None
        self._is_complete = False

    def add_documents(
        self, documents: Sequence[Sequence[int]], masks: Sequence[np.ndarray] = ()
    ) -> None:
        """Append documents as token ids, each with its end-of-document token; with a mask also
        [tokens] uint8 each.
        """
        lengths = np.fromiter(map(len, documents), dtype="<i4", count=len(documents))
        self._write(
            np.fromiter(chain.from_iterable(documents), dtype=self.dtype, count=lengths.sum()).data
        )
        self._add_lengths(lengths)
        if self._mask is not None:
            assert list(map(len, masks)) == lengths.tolist(), (
                "every document has a mask of its length"
            )
            self._mask.write(b"".join(mask.astype(np.uint8).data for mask in masks))

    def append_pair(self, prefix: Path) -> None:
        """Append every sequence of another pair as a document; the pair may be empty."""
        header = read_header(idx_path(prefix))
        assert header.dtype == self.dtype, f"{prefix} holds {header.dtype}, not {self.dtype}"
        with idx_path(prefix).open("rb") as index:
            index.seek(HEADER.size)
            self._add_lengths(np.fromfile(index, dtype="<i4", count=header.num_sequences))
        with bin_path(prefix).open("rb") as tokens:
            while some := tokens.read(_COPY_BYTES):
                self._write(some)
        if self._mask is not None:
            with mask_path(prefix).open("rb") as mask:
                shutil.copyfileobj(mask, self._mask, _COPY_BYTES)

    def _write(self, data: memoryview | bytes) -> None:
        self._file.write(data)
        self.sums.add(data)

    def _add_lengths(self, lengths: np.ndarray) -> None:
        self._lengths.append(lengths)
        self.num_documents += len(lengths)
        self.num_tokens += int(lengths.sum(dtype=np.int64))

    def complete(self) -> None:
        """Write the index and sync both files to disk, still under their temporary names; nothing
        may be added then.
        """
        if not self._is_complete:
            _sync(self._file)
            if self._mask is not None:
                _sync(self._mask)
            with self._partials[1].open("xb") as file:
                self._write_index(file)
                _sync(file)
        self._is_complete = True

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        tokens, index, mask = self._partials
        try:
            if kind is not None:
                return
            self.complete()
            # an index never stands beside the tokens of another
            idx_path(self.prefix).unlink(missing_ok=True)
            mask_path(self.prefix).unlink(missing_ok=True)
            os.replace(tokens, bin_path(self.prefix))
            if self._mask is not None:
                os.replace(mask, mask_path(self.prefix))
            os.replace(index, idx_path(self.prefix))
        finally:  # on a full disk even closing fails, as it writes what is buffered
            for file in (self._file, self._mask):
                with suppress(OSError, AttributeError):
                    file.close()  # type: ignore[union-attr]
            for partial in self._partials:
                partial.unlink(missing_ok=True)

    def _write_index(self, file: BinaryIO) -> None:
        lengths = np.concatenate([np.empty(0, dtype="<i4"), *self._lengths])
        file.write(IndexHeader(self.dtype, len(lengths), len(lengths) + 1).pack())
        file.write(lengths.data)
        ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        file.write(np.concatenate([np.zeros(1, dtype="<i8"), ends[:-1]])[: len(lengths)].data)
        file.write(np.arange(len(lengths) + 1, dtype="<i8").data)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
