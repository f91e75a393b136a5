"""Split the inputs of `nanotrain prepare` into chunks that processes tokenize independently.

    file.txt, .md          one document per file; small files share a chunk
    file.jsonl, .ndjson    one document per line; a chunk is a range of bytes and contains the lines that start in it
    file.txt.gz, ...       any of these four compressed (.gz .bz2 .xz .zst); one chunk
    file.parquet           one document per row; a chunk is a range of row groups
    folder                 every such file below it, sorted by path, compressed ones too; hidden ones are left out
    pattern                files/*.jsonl: every match, sorted by path
    anything else          `datasets`: other file types, saved datasets, hub names; a chunk is a range of rows

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
_NUM_CHUNKS, _MIN_BYTES, _MAX_BYTES = 512, 1 << 20, 256 << 20
_TEXT_TYPES, _LINE_TYPES = (".txt", ".md"), (".jsonl", ".ndjson")
_ROW_TYPES = {f".{name}": name for name in ("csv", "arrow", "json", "parquet")} | dict.fromkeys(
    _LINE_TYPES, "json"
)
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
    """Split files, folders and hub names into chunks, in order; `subset` and `split` select from
    hub datasets.

    Raises:
        DataError: an input is missing, unreadable or empty, or `subset` or `split` has no effect on
            any input.
    """
    expanded = [_expand(name) for name in inputs]
    # test data must not become training data
    if None not in expanded and (subset is not None or split != "train"):
        flag = f"--subset {subset}" if subset is not None else f"--split-name {split}"
        raise DataError(
            f"{flag} has no effect on {', '.join(inputs)}",
            why="all of its files are read; subsets and splits are those of Hugging Face datasets",
            fix="name the files that are wanted, for example as a pattern in quotes, or leave it out",
        )
    sizes = [path.stat().st_size for paths in expanded for path in paths or ()]
    chunk_bytes = min(max(sum(sizes) // _NUM_CHUNKS, _MIN_BYTES), _MAX_BYTES)
    chunks: list[InputChunk] = []
    for name, paths in zip(inputs, expanded, strict=True):
        chunks += (
            _split_rows(HubDataset(name, subset, split))
            if paths is None
            else _split_files(paths, chunk_bytes)
        )
    if not chunks:
        raise DataError(
            f"{', '.join(inputs)} holds no text",
            why="every file is empty",
            fix="give files with text",
        )
    return tuple(chunks)


def streamed_dataset(name: str, *, subset: str | None, split: str) -> HubDataset:
    """The dataset of an input with `--streaming`: a hub name, a folder, or a file of rows,
    compressed or not.

    Raises:
        DataError: a file type without rows.
    """
    path = local_path(name)
    if path.is_file():
        return _dataset_of_file(path)
    if glob.has_magic(name):
        fix = "name one file or folder, or leave --streaming out"
        raise DataError(
            f"{name} cannot be streamed",
            why="it is a pattern, and one dataset is streamed",
            fix=fix,
        )
    return HubDataset(str(path) if path.is_dir() else name, subset, split)


def _expand(name: str) -> list[Path] | None:
    """The files of an input; None for what `datasets` has to load."""
    path = local_path(name)
    if path.is_file():
        return [path]
    if path.is_dir():
        return None if is_saved_dataset(path) else _files_below(path) or None
    if path.exists():  # as <(zcat FILE) of a shell
        why = "it is a pipe or device, and files are read in parts and more than once"
        raise DataError(
            f"{name} is no file",
            why=why,
            fix="write what it gives to a file, which may be compressed",
        )
    if glob.has_magic(name):
        return _matches(name)
    if (
        is_compressed(path)
        or path.suffix.lower() in {*SPLITTERS, *_ROW_TYPES}
        or name.startswith((".", "/", "~"))
    ):
        raise DataError(
            f"{name} does not exist", why="no such file or folder", fix="check the path of --input"
        )
    return None


def _files_below(folder: Path) -> list[Path]:
    """The files of documents, without hidden ones, and without compressed copies of files that are
    there too.

    Copying and version control leave many hidden files; `zstd` and `gzip -k` keep the file that
    they compress.
    """
    files = [
        file for file in folder.rglob("*") if _splitter_of(file) is not None and file.is_file()
    ]
    kept = {
        file
        for file in files
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    }
    return sorted(
        file for file in kept if not (is_compressed(file) and file.with_suffix("") in kept)
    )


def _matches(pattern: str) -> list[Path]:
    """The files that match a pattern, and those of documents below the folders that do."""
    found = [Path(name) for name in sorted(glob.glob(expanded(pattern), recursive=True))]
    files = [
        file
        for path in found
        for file in (_files_below(path) if path.is_dir() else [path] if path.exists() else [])
    ]
    if not files:
        raise DataError(
            f"no file matches {pattern}", why="it is a pattern", fix="check the path of --input"
        )
    return list(dict.fromkeys(files))


def _split_files(paths: Iterable[Path], chunk_bytes: int) -> list[InputChunk]:
    chunks: list[InputChunk] = []
    for path in paths:
        try:
            path.open("rb").close()
        except OSError as error:
            raise DataError(
                f"{path} cannot be read", why=error.strerror or "", fix="check its permissions"
            ) from None
        if path.stat().st_size == 0:
            continue
        check_zstandard(str(path))
        split = _splitter_of(path)
        for chunk in (
            _split_rows(_dataset_of_file(path)) if split is None else split(path, chunk_bytes)
        ):
            last = chunks[-1] if chunks else None
            if (
                last
                and chunk.kind == last.kind == "text"
                and last.num_bytes + chunk.num_bytes <= chunk_bytes
            ):
                chunks[-1] = InputChunk(
                    "text", last.files + chunk.files, num_bytes=last.num_bytes + chunk.num_bytes
                )
            else:
                chunks.append(chunk)
    return chunks


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
    return [
        InputChunk("lines", (str(path),), start, stop, stop - start)
        for start, stop in pairwise(edges)
    ]


def _split_parquet(path: Path, chunk_bytes: int) -> list[InputChunk]:
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.ParquetFile(path).metadata
    except Exception as error:
        raise DataError(
            f"{path} is no parquet file", why=str(error), fix="write or copy it again"
        ) from None
    groups = range(metadata.num_row_groups)
    sizes = [metadata.row_group(group).total_byte_size for group in groups]
    edges, total = [0], 0
    for group in groups:
        total += sizes[group]
        if total >= chunk_bytes or group == groups[-1]:
            edges.append(group + 1)
            total = 0
    return [
        InputChunk("parquet", (str(path),), start, stop, sum(sizes[start:stop]))
        for start, stop in pairwise(edges)
    ]


def _dataset_of_file(path: Path) -> HubDataset:
    suffix = uncompressed_suffix(path)
    if suffix not in _ROW_TYPES:
        raise DataError(
            f"{path} is of no supported type",
            why=f"rows are read from {', '.join(_ROW_TYPES)}, text from .txt and .md; also compressed as .gz or .zst",
            fix="rename it to .txt if it is plain text (and leave --streaming out)",
        )
    return HubDataset(_ROW_TYPES[suffix], None, "train", (str(path),))


def _split_rows(dataset: HubDataset) -> list[InputChunk]:
    rows: Any = load_rows(dataset)
    row_bytes = rows.data.nbytes / max(1, len(rows))
    step = max(1, len(rows) // _NUM_CHUNKS, int(_MIN_BYTES / max(1.0, row_bytes)))
    edges = [*range(0, len(rows), step), len(rows)]
    return [
        InputChunk("rows", dataset.files, start, stop, int(row_bytes * (stop - start)), dataset)
        for start, stop in pairwise(edges)
    ]


# How a file is split, by its suffix; `readers.READERS` has how its chunks are read.
SPLITTERS = (
    {".parquet": _split_parquet}
    | dict.fromkeys(_TEXT_TYPES, _split_text)
    | dict.fromkeys(_LINE_TYPES, _split_lines)
)
