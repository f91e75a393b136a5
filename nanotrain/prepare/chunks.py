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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from nanotrain.errors import DataError
from nanotrain.paths import expanded, local_path
from nanotrain.prepare.inputs import (
    HubDataset,
    check_zstandard,
    is_compressed,
    is_saved_dataset,
    load_rows,
    uncompressed_suffix,
)

# The input is split into about this many chunks, within these bounds in bytes: enough to keep every
# core busy.
_NUM_CHUNKS = 512
_MIN_BYTES, _MAX_BYTES = 1 << 20, 256 << 20
_TEXT_TYPES = (".txt", ".md")
_LINE_TYPES = (".jsonl", ".ndjson")
_ROW_TYPES = {
    ".csv": "csv",
    ".arrow": "arrow",
    ".json": "json",
    ".parquet": "parquet",
    ".jsonl": "json",
    ".ndjson": "json",
}
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
    texts: tuple[str, ...] = ()  # the documents themselves, for kind "texts" (streaming)


def plan_chunks(inputs: Sequence[str], *, subset: str | None, split: str) -> tuple[InputChunk, ...]:
    """Split files, folders and hub names into chunks, in order.

    Args:
        inputs: names of files, folders, patterns or datasets.
        subset: configuration of the datasets; None for their only one.
        split: split of the datasets.

    Raises:
        DataError: an input is missing, unreadable or empty, or `subset` or `split` has no effect on
            any input.
    """
    files_by_input = [_expand(name) for name in inputs]
    if None not in files_by_input:
        _require_no_selection(inputs, subset=subset, split=split)
    total_bytes = 0
    for paths in files_by_input:
        total_bytes += sum(path.stat().st_size for path in paths or ())
    chunk_bytes = min(max(total_bytes // _NUM_CHUNKS, _MIN_BYTES), _MAX_BYTES)
    chunks: list[InputChunk] = []
    for name, paths in zip(inputs, files_by_input, strict=True):
        if paths is None:
            chunks += _split_rows(HubDataset(name, subset, split))
        else:
            chunks += _split_files(paths, chunk_bytes)
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


def _expand(name: str) -> list[Path] | None:
    """The files of an input; None for what `datasets` has to load."""
    path = local_path(name)
    if path.is_file():
        return [path]
    if path.is_dir():
        return None if is_saved_dataset(path) else _files_below(path) or None
    if path.exists():  # such as <(zcat FILE) of a shell
        raise DataError(
            f"{name} is no file",
            why="it is a pipe or device, and files are read in parts and more than once",
            fix="write what it gives to a file, which may be compressed",
        )
    if glob.has_magic(name):
        return _matches(name)
    has_file_suffix = is_compressed(path) or path.suffix.lower() in {*SPLITTERS, *_ROW_TYPES}
    if has_file_suffix or name.startswith((".", "/", "~")):
        raise DataError(
            f"{name} does not exist", why="no such file or folder", fix="check the path of --input"
        )
    return None


def _files_below(folder: Path) -> list[Path]:
    """The files of documents, without hidden files and compressed copies.

    Copying and version control leave many hidden files; `zstd` and `gzip -k` keep the file that
    they compress.
    """
    files = set()
    for file in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if not is_hidden and _splitter_of(file) is not None and file.is_file():
            files.add(file)
    copies = {file for file in files if is_compressed(file) and file.with_suffix("") in files}
    return sorted(files - copies)


def _matches(pattern: str) -> list[Path]:
    """The files that match a pattern, and the files of documents below folders that match."""
    files: dict[Path, None] = {}  # in order, without repetition
    for name in sorted(glob.glob(expanded(pattern), recursive=True)):
        path = Path(name)
        if path.is_dir():
            files |= dict.fromkeys(_files_below(path))
        elif path.exists():
            files[path] = None
    if not files:
        raise DataError(
            f"no file matches {pattern}", why="it is a pattern", fix="check the path of --input"
        )
    return list(files)


def _split_files(paths: Iterable[Path], chunk_bytes: int) -> list[InputChunk]:
    chunks: list[InputChunk] = []
    for path in paths:
        _check_readable(path)
        if path.stat().st_size == 0:
            continue
        check_zstandard(str(path))
        split = _splitter_of(path)
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


def _splitter_of(path: Path) -> Callable[[Path, int], list[InputChunk]] | None:
    """The function that splits a file; None for what `datasets` has to load."""
    suffix = uncompressed_suffix(path)
    if not is_compressed(path) or suffix in _TEXT_TYPES:
        return SPLITTERS.get(suffix)
    return _whole_lines if suffix in _LINE_TYPES else None


def _whole_lines(path: Path, chunk_bytes: int) -> list[InputChunk]:
    """A compressed file: it is read from its beginning only, and its length is unknown."""
    return [InputChunk("lines", (str(path),), 0, _ANY_LENGTH, path.stat().st_size)]


def _split_text(path: Path, chunk_bytes: int) -> list[InputChunk]:
    return [InputChunk("text", (str(path),), num_bytes=path.stat().st_size)]


def _split_lines(path: Path, chunk_bytes: int) -> list[InputChunk]:
    size = path.stat().st_size
    edges = [*range(0, size, chunk_bytes), size]
    chunks = []
    for start, stop in pairwise(edges):
        chunks.append(InputChunk("lines", (str(path),), start, stop, stop - start))
    return chunks


def _split_parquet(path: Path, chunk_bytes: int) -> list[InputChunk]:
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
    for group in range(metadata.num_row_groups):
        num_bytes += metadata.row_group(group).total_byte_size
        if num_bytes >= chunk_bytes or group == last:
            chunks.append(InputChunk("parquet", (str(path),), start, group + 1, num_bytes))
            start = group + 1
            num_bytes = 0
    return chunks


def _dataset_of_file(path: Path) -> HubDataset:
    suffix = uncompressed_suffix(path)
    if suffix not in _ROW_TYPES:
        raise DataError(
            f"{path} is of no supported type",
            why=(
                f"rows are read from {', '.join(_ROW_TYPES)}, text from .txt and .md; "
                "also compressed as .gz or .zst"
            ),
            fix="rename it to .txt if it is plain text (and leave --streaming out)",
        )
    return HubDataset(_ROW_TYPES[suffix], None, "train", (str(path),))


def _split_rows(dataset: HubDataset) -> list[InputChunk]:
    rows: Any = load_rows(dataset)
    row_bytes = rows.data.nbytes / max(1, len(rows))
    fewest_rows = int(_MIN_BYTES / max(1.0, row_bytes))
    step = max(1, len(rows) // _NUM_CHUNKS, fewest_rows)
    edges = [*range(0, len(rows), step), len(rows)]
    chunks = []
    for start, stop in pairwise(edges):
        num_bytes = int(row_bytes * (stop - start))
        chunks.append(InputChunk("rows", dataset.files, start, stop, num_bytes, dataset))
    return chunks


# Functions that split a file, by its suffix; `readers.READERS` has those that read its chunks.
SPLITTERS: dict[str, Callable[[Path, int], list[InputChunk]]] = {
    ".parquet": _split_parquet,
    ".txt": _split_text,
    ".md": _split_text,
    ".jsonl": _split_lines,
    ".ndjson": _split_lines,
}
