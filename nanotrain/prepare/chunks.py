"""Split the inputs of `nanotrain prepare` into chunks that processes tokenize independently.

    file.txt, .md          one document per file; small files share a chunk
    file.jsonl, .ndjson    one document per line; a chunk is a range of bytes and contains the lines
                           that start in it
    file.txt.gz, ...       any of these four compressed (.gz .bz2 .xz .zst); one chunk
    file.parquet           one document per row; a chunk is a range of row groups
    folder                 every such file below it, sorted by path, compressed ones too, without
                           hidden ones
    pattern                files/*.jsonl: every match, sorted by path
    anything else          `datasets`: other file types, saved datasets, hub names; a chunk is a
                           range of rows

Chunks depend on the inputs only, never on the number of workers, and keep the order of documents.
"""

import glob
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from nanotrain.errors import DataError
from nanotrain.paths import local_path
from nanotrain.prepare.inflation import require_bounded
from nanotrain.prepare.inputs import (
    HubDataset,
    check_zstandard,
    is_compressed,
    load_rows,
    open_input,
    uncompressed_suffix,
)
from nanotrain.prepare.selection import ROW_TYPES, Selection, select_files
from nanotrain.untrusted import MAX_LINE, parse_json

# The input is split into about this many chunks, within these bounds in bytes: enough to keep every
# core busy.
_NUM_CHUNKS = 512
_MIN_BYTES, _MAX_BYTES = 1 << 20, 256 << 20
_TEXT_TYPES = (".txt", ".md")
_LINE_TYPES = (".jsonl", ".ndjson")
_ANY_LENGTH = 1 << 62  # more bytes than a file has


@dataclass(frozen=True)
class InputChunk:
    """A range of the input that one process tokenizes into one part file."""

    kind: str  # how it is read, a key of `readers.READERS`
    files: tuple[str, ...] = ()  # the input files; one, except for small text files
    start: int = 0  # first byte, row group or row
    stop: int = 0  # one after the last
    num_bytes: int = 0  # size for the progress bar; 0 if unknown
    dataset: HubDataset | None = None  # source of the rows, for kind "rows"
    columns: tuple[str, ...] = ()  # columns of the rows, where they are known
    texts: tuple[str, ...] = ()  # the documents themselves, for kind "texts" (streaming)


def select_inputs(
    inputs: Sequence[str], *, text_suffixes: Sequence[str] = ()
) -> tuple[Selection, ...]:
    """The files of every input.

    Args:
        inputs: names of files, folders, patterns or datasets.
        text_suffixes: further types of files that are text, such as ".py".

    Raises:
        DataError: an input is missing, or is a folder without documents.
    """

    def is_document(path: Path) -> bool:
        # a folder has .json files of settings, so these are read where they are named
        is_settings = uncompressed_suffix(path) == ".json" and ".json" not in text_suffixes
        return not is_settings and _splitter_of(path, text_suffixes) is not None

    return tuple(select_files(name, is_document=is_document) for name in inputs)


def plan_chunks(
    inputs: Sequence[str], *, subset: str | None, split: str, text_suffixes: Sequence[str] = ()
) -> tuple[InputChunk, ...]:
    """Split files, folders and hub names into chunks, in order; arguments as of `split_inputs`."""
    selections = select_inputs(inputs, text_suffixes=text_suffixes)
    return split_inputs(selections, subset=subset, split=split, text_suffixes=text_suffixes)


def split_inputs(
    selections: Sequence[Selection],
    *,
    subset: str | None,
    split: str,
    text_suffixes: Sequence[str] = (),
) -> tuple[InputChunk, ...]:
    """Split the files of inputs and datasets into chunks, in order.

    Args:
        selections: the inputs, as `select_inputs` gives them.
        subset: configuration of the datasets; None for their only one.
        split: split of the datasets.
        text_suffixes: further types of files that are text.

    Raises:
        DataError: an input is missing, unreadable or empty, or `subset` or `split` has no effect on
            any input.
    """
    inputs = [selection.name for selection in selections]
    if all(selection.files is not None for selection in selections):
        _require_no_selection(inputs, subset=subset, split=split)
    total_bytes = 0
    for selection in selections:
        total_bytes += sum(path.stat().st_size for path in selection.files or ())
    chunk_bytes = min(max(total_bytes // _NUM_CHUNKS, _MIN_BYTES), _MAX_BYTES)
    chunks: list[InputChunk] = []
    for selection in selections:
        if selection.files is None:
            chunks += _split_rows(HubDataset(selection.name, subset, split))
        else:
            chunks += _split_files(selection.files, chunk_bytes, text_suffixes=text_suffixes)
    if not chunks:
        raise DataError(
            f"{', '.join(inputs)} holds no text",
            why="every file is empty",
            fix="give files with text",
        )
    return tuple(chunks)


def _require_no_selection(inputs: Sequence[str], *, subset: str | None, split: str) -> None:
    """Check that files are read without a selection: test data must not become training data."""
    if subset is None and split == "train":
        return
    flag = f"--subset {subset}" if subset is not None else f"--split-name {split}"
    raise DataError(
        f"{flag} has no effect on {', '.join(inputs)}",
        why="all of its files are read; subsets and splits are those of Hugging Face datasets",
        fix="name the files that are wanted, for example as a pattern in quotes, or leave it out",
    )


def streamed_dataset(name: str, *, subset: str | None, split: str) -> HubDataset:
    """The dataset of an input with `--streaming`: a hub name, a folder or a file of rows.

    Raises:
        DataError: a file type without rows.
    """
    path = local_path(name)
    if path.is_file():
        return _dataset_of_file(path)
    if glob.has_magic(name):
        raise DataError(
            f"{name} cannot be streamed",
            why="it is a pattern, and one dataset is streamed",
            fix="name one file or folder, or leave --streaming out",
        )
    return HubDataset(str(path) if path.is_dir() else name, subset, split)


def _split_files(
    paths: Iterable[Path], chunk_bytes: int, *, text_suffixes: Sequence[str]
) -> list[InputChunk]:
    """Split files into chunks of about `chunk_bytes`; small files share a chunk."""
    chunks: list[InputChunk] = []
    for path in paths:
        _check_readable(path)
        if path.stat().st_size == 0:
            continue
        check_zstandard(str(path))
        split = _splitter_of(path, text_suffixes)
        if split is None:
            new = _split_rows(_dataset_of_file(path))
        else:
            new = split(path, chunk_bytes)
        for chunk in new:
            if chunks and _fit_together(chunks[-1], chunk, chunk_bytes=chunk_bytes):
                chunks[-1] = _join(chunks[-1], chunk)
            else:
                chunks.append(chunk)
    return chunks


def _check_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read", why=error.strerror or "", fix="check its permissions"
        ) from None


def _fit_together(first: InputChunk, second: InputChunk, *, chunk_bytes: int) -> bool:
    """Whether two chunks are text files that are small enough for one chunk."""
    if first.kind != "text" or second.kind != "text":
        return False
    return first.num_bytes + second.num_bytes <= chunk_bytes


def _join(first: InputChunk, second: InputChunk) -> InputChunk:
    """One chunk of several text files."""
    num_bytes = first.num_bytes + second.num_bytes
    return InputChunk("text", first.files + second.files, num_bytes=num_bytes)


def _splitter_of(
    path: Path, text_suffixes: Sequence[str] = ()
) -> Callable[[Path, int], list[InputChunk]] | None:
    """The function that splits a file; None for what `datasets` has to load."""
    suffix = uncompressed_suffix(path)
    if suffix in text_suffixes:
        return _split_text
    if not is_compressed(path) or suffix in _TEXT_TYPES:
        return SPLITTERS.get(suffix)
    if suffix == ".json":
        return _split_json
    return _whole_lines if suffix in _LINE_TYPES else None


def _whole_lines(path: Path, chunk_bytes: int) -> list[InputChunk]:
    """A compressed file: it is read from its beginning only, and its length is unknown."""
    return [InputChunk("lines", (str(path),), 0, _ANY_LENGTH, path.stat().st_size)]


def _split_text(path: Path, chunk_bytes: int) -> list[InputChunk]:
    return [InputChunk("text", (str(path),), num_bytes=path.stat().st_size)]


def _split_lines(path: Path, chunk_bytes: int) -> list[InputChunk]:
    """Chunks of a file with one document per line, by bytes."""
    size = path.stat().st_size
    edges = [*range(0, size, chunk_bytes), size]
    chunks = []
    for start, stop in pairwise(edges):
        chunks.append(InputChunk("lines", (str(path),), start, stop, stop - start))
    return chunks


def _split_json(path: Path, chunk_bytes: int) -> list[InputChunk]:
    """A file of one JSON list or object, or one with an object per line."""
    with open_input(str(path)) as stream:
        line = stream.readline(MAX_LINE)
    try:
        has_lines = isinstance(parse_json(line, allow_nan=True), dict)
    except ValueError:
        has_lines = False
    if has_lines:
        return (_whole_lines if is_compressed(path) else _split_lines)(path, chunk_bytes)
    return [InputChunk("json", (str(path),), num_bytes=path.stat().st_size)]


def _split_parquet(path: Path, chunk_bytes: int) -> list[InputChunk]:
    """Chunks of whole row groups of a parquet file."""
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.ParquetFile(path).metadata
    except Exception as error:
        raise DataError(
            f"{path} is no parquet file", why=str(error), fix="write or copy it again"
        ) from None
    chunks = []
    start = 0
    num_bytes = 0
    last = metadata.num_row_groups - 1
    names = tuple(metadata.schema.to_arrow_schema().names)
    for group in range(metadata.num_row_groups):
        num_bytes += metadata.row_group(group).total_byte_size
        if num_bytes >= chunk_bytes or group == last:
            files = (str(path),)
            chunk = InputChunk("parquet", files, start, group + 1, num_bytes, columns=names)
            chunks.append(chunk)
            start = group + 1
            num_bytes = 0
    return chunks


def _dataset_of_file(path: Path) -> HubDataset:
    """The description of a file of rows that `datasets` loads."""
    suffix = uncompressed_suffix(path)
    if suffix not in ROW_TYPES:
        raise DataError(
            f"{path} is of no supported type",
            why=(
                f"rows are read from {', '.join(ROW_TYPES)}, text from .txt and .md; "
                "also compressed as .gz or .zst"
            ),
            fix=(
                f"--text-suffix {path.suffix or '.txt'} reads it as plain text "
                "(and leave --streaming out)"
            ),
        )
    return HubDataset(ROW_TYPES[suffix], None, "train", (str(path),))


def _split_rows(dataset: HubDataset) -> list[InputChunk]:
    """Chunks of equal numbers of rows of a dataset."""
    require_bounded(dataset.files, folder=Path(dataset.name))
    rows: Any = load_rows(dataset)
    row_bytes = rows.data.nbytes / max(1, len(rows))
    fewest_rows = int(_MIN_BYTES / max(1.0, row_bytes))
    step = max(1, len(rows) // _NUM_CHUNKS, fewest_rows)
    edges = [*range(0, len(rows), step), len(rows)]
    chunks = []
    for start, stop in pairwise(edges):
        num_bytes = int(row_bytes * (stop - start))
        chunk = InputChunk("rows", dataset.files, start, stop, num_bytes, dataset)
        chunks.append(replace(chunk, columns=tuple(rows.column_names)))
    return chunks


# Functions that split a file, by its suffix; `readers.READERS` has functions that read its chunks.
SPLITTERS: dict[str, Callable[[Path, int], list[InputChunk]]] = {
    ".parquet": _split_parquet,
    ".txt": _split_text,
    ".md": _split_text,
    ".jsonl": _split_lines,
    ".ndjson": _split_lines,
    ".json": _split_json,
}
