"""What `nanotrain prepare --input` names, cut into pieces that processes can work on alone.

    file.txt               one document; small files share a piece
    file.jsonl             a document a line; a piece is a range of bytes, and owns the lines that begin in it
    file.parquet           a document a row; a piece is a range of row groups
    folder                 every such file below it, in the order of their paths
    anything else          `datasets.load_dataset`: other file types, hub names; a piece is a range of rows

Pieces depend on the inputs only, never on the number of workers, and keep the order of documents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from nanotrain.data import hf
from nanotrain.errors import DataError

# So many pieces are wanted, within these bounds in bytes of one: enough to keep every core busy to the end.
_PIECES, _LEAST_BYTES, _MOST_BYTES = 512, 1 << 20, 256 << 20
_LOADED_TYPES = {".csv": "csv", ".arrow": "arrow", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}


@dataclass(frozen=True)
class Piece:
    """A part of the input, small enough for one process and one sitting.

    Args:
        kind: how it is read, a key of `readers.READERS`.
        files: the files it lies in; one, but for small text files.
        start: first byte, row group or row.
        stop: one behind the last.
        num_bytes: how large it is, for the progress bar; 0 where unknown.
        corpus: where rows come from, for kind "rows".
        texts: the documents themselves, for kind "texts" (streaming).
    """

    kind: str
    files: tuple[str, ...] = ()
    start: int = 0
    stop: int = 0
    num_bytes: int = 0
    corpus: hf.HubCorpus | None = None
    texts: tuple[str, ...] = ()


def plan_pieces(inputs: Sequence[str], *, subset: str | None, split: str) -> tuple[Piece, ...]:
    """Cut the inputs into pieces, in order.

    Args:
        inputs: files, folders and hub names.
        subset: configuration of hub corpora.
        split: split of hub corpora.

    Raises:
        DataError: an input is missing, unreadable or empty.
    """
    found = [_expand(name) for name in inputs]
    sizes = [path.stat().st_size for paths in found for path in paths or ()]
    piece_bytes = min(max(sum(sizes) // _PIECES, _LEAST_BYTES), _MOST_BYTES)
    pieces: list[Piece] = []
    for name, paths in zip(inputs, found, strict=True):
        if paths is None:
            pieces += _cut_rows(hf.HubCorpus(name, subset, split))
        else:
            pieces += _cut_files(paths, piece_bytes)
    if not pieces:
        raise DataError(
            f"{', '.join(inputs)} holds no text", why="every file is empty", fix="give files with text in them"
        )
    return tuple(pieces)


def streamed_corpus(name: str, *, subset: str | None, split: str) -> hf.HubCorpus:
    """What an input stands for with `--streaming`: a hub name, a folder, or a file of rows, compressed or not.

    Raises:
        DataError: a file that is not made of rows.
    """
    path = Path(name).expanduser()
    return (
        _loaded_by_type(path) if path.is_file() else hf.HubCorpus(str(path) if path.is_dir() else name, subset, split)
    )


def _expand(name: str) -> list[Path] | None:
    """The files an input stands for; None for what `datasets` has to find."""
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _CUTTERS and file.is_file())
        return files or None
    if path.suffix in {*_CUTTERS, *_LOADED_TYPES, *_COMPRESSED} or name.startswith((".", "/", "~")):
        raise DataError(f"{name} does not exist", why="it is no file or folder here", fix="check the path of --input")
    return None


def _cut_files(paths: Iterable[Path], piece_bytes: int) -> list[Piece]:
    pieces: list[Piece] = []
    for path in paths:
        try:
            path.open("rb").close()
        except OSError as error:
            raise DataError(f"{path} cannot be read", why=error.strerror or "", fix="check its permissions") from None
        if path.stat().st_size == 0:
            continue
        for piece in _CUTTERS.get(path.suffix, _cut_other)(path, piece_bytes):
            last = pieces[-1] if pieces else None
            if last and piece.kind == last.kind == "text" and last.num_bytes + piece.num_bytes <= piece_bytes:
                joined = Piece("text", last.files + piece.files, num_bytes=last.num_bytes + piece.num_bytes)
                pieces[-1] = joined
            else:
                pieces.append(piece)
    return pieces


def _cut_text(path: Path, piece_bytes: int) -> list[Piece]:
    return [Piece("text", (str(path),), num_bytes=path.stat().st_size)]


def _cut_lines(path: Path, piece_bytes: int) -> list[Piece]:
    size = path.stat().st_size
    edges = [*range(0, size, piece_bytes), size]
    return [Piece("lines", (str(path),), start, stop, stop - start) for start, stop in pairwise(edges)]


def _cut_parquet(path: Path, piece_bytes: int) -> list[Piece]:
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.ParquetFile(path).metadata
    except Exception as error:
        raise DataError(f"{path} is no parquet file", why=str(error), fix="write or copy it again") from None
    groups = range(metadata.num_row_groups)
    sizes = [metadata.row_group(group).total_byte_size for group in groups]
    edges, gathered = [0], 0
    for group in groups:
        gathered += sizes[group]
        if gathered >= piece_bytes or group == groups[-1]:
            edges.append(group + 1)
            gathered = 0
    return [Piece("parquet", (str(path),), start, stop, sum(sizes[start:stop])) for start, stop in pairwise(edges)]


def _cut_other(path: Path, piece_bytes: int) -> list[Piece]:
    return _cut_rows(_loaded_by_type(path))


def _loaded_by_type(path: Path) -> hf.HubCorpus:
    suffix = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    if suffix not in _LOADED_TYPES:
        raise DataError(
            f"{path} is of no known type",
            why=f"rows come from {', '.join(_LOADED_TYPES)} and their .gz or .zst, plain text from .txt and .md",
            fix="rename it to .txt if it is plain text (and leave --streaming out)",
        )
    return hf.HubCorpus(_LOADED_TYPES[suffix], None, "train", (str(path),))


def _cut_rows(corpus: hf.HubCorpus) -> list[Piece]:
    rows: Any = hf.load_rows(corpus)
    row_bytes = rows.data.nbytes / max(1, len(rows))
    step = max(1, len(rows) // _PIECES, int(_LEAST_BYTES / max(1.0, row_bytes)))
    edges = [*range(0, len(rows), step), len(rows)]
    return [
        Piece("rows", corpus.files, start, stop, int(row_bytes * (stop - start)), corpus)
        for start, stop in pairwise(edges)
    ]


_CUTTERS = {".txt": _cut_text, ".md": _cut_text, ".jsonl": _cut_lines, ".ndjson": _cut_lines, ".parquet": _cut_parquet}
