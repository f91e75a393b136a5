"""The documents of a piece: one reader for each kind, all with the same signature."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanotrain.data import hf
from nanotrain.errors import DataError
from nanotrain.prepare.documents import Piece

_ROWS_TOGETHER = 256


def read_documents(piece: Piece, column: str) -> Iterator[str]:
    """The documents of a piece, in order; empty ones are left out.

    Args:
        piece: what is read.
        column: field of a row that holds the text; plain text files have none.

    Raises:
        DataError: unreadable text, broken JSON, or no such column.
    """
    return (text for text in READERS[piece.kind](piece, column) if text)


def pick_text(row: Mapping[str, Any], column: str, *, place: str, columns: Sequence[str] | None = None) -> str:
    """The text of a row; empty for null.

    Args:
        row: column name -> value.
        column: the wanted one.
        place: where the row lies, for the error.
        columns: all there are, where the row holds only the wanted one.

    Raises:
        DataError: no such column, or no text in it.
    """
    names = ", ".join(columns or row)
    if column not in row:
        raise DataError(
            f"{place} has no column {column}",
            why=f"its columns are {names}",
            fix="name one with --text-column",
        )
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(
            f"{place} holds no text in column {column}",
            why=f"it holds a {type(text).__name__}; the columns are {names}",
            fix="name a column of strings with --text-column",
        )
    return text


def _read_text(piece: Piece, column: str) -> Iterator[str]:
    for file in piece.files:
        yield _decode(_bytes_of(file), file)


def _read_lines(piece: Piece, column: str) -> Iterator[str]:
    file = piece.files[0]
    with Path(file).open("rb") as stream:
        if piece.start:
            # The line that reaches into this piece belongs to the one before: begin behind the first newline
            # at or after the byte before us.
            stream.seek(piece.start - 1)
            stream.readline()
        while (begin := stream.tell()) < piece.stop:
            line = stream.readline()
            if line.strip():
                yield _text_of_line(line, column, file=file, begin=begin)


def _text_of_line(line: bytes, column: str, *, file: str, begin: int) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{file} line {_line_number(file, begin)} is no JSON",
            why=str(error),
            fix="a .jsonl file holds one JSON object a line; mend or remove the line",
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f"{file} line {_line_number(file, begin)} is no JSON object",
            why=f"it is a {type(row).__name__}",
            fix='write each document as {"text": "..."}',
        )
    if isinstance(row.get(column), str):
        return str(row[column])
    return pick_text(row, column, place=f"{file} line {_line_number(file, begin)}")


def _read_parquet(piece: Piece, column: str) -> Iterator[str]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(piece.files[0])
    names = file.schema_arrow.names
    if column not in names:
        pick_text(dict.fromkeys(names), column, place=piece.files[0])
    for batch in file.iter_batches(_ROWS_TOGETHER, row_groups=range(piece.start, piece.stop), columns=[column]):
        for text in batch.column(0).to_pylist():
            yield pick_text({column: text}, column, place=piece.files[0], columns=names)


def _read_rows(piece: Piece, column: str) -> Iterator[str]:
    assert piece.corpus is not None, "rows come from a corpus"
    rows = hf.load_rows(piece.corpus)
    place = piece.files[0] if piece.files else piece.corpus.name
    if column not in rows.column_names:
        pick_text(dict.fromkeys(rows.column_names), column, place=place)
    for batch in rows.select(range(piece.start, piece.stop)).select_columns([column]).iter(_ROWS_TOGETHER):
        for text in batch[column]:
            yield pick_text({column: text}, column, place=place, columns=rows.column_names)


def _read_texts(piece: Piece, column: str) -> Iterator[str]:
    yield from piece.texts


READERS: dict[str, Callable[[Piece, str], Iterator[str]]] = {
    "text": _read_text,
    "lines": _read_lines,
    "parquet": _read_parquet,
    "rows": _read_rows,
    "texts": _read_texts,
}


def _bytes_of(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read", why=error.strerror or "", fix="check its permissions") from None


def _decode(data: bytes, file: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8", why=f"byte {error.start} is {data[error.start]:#04x}", fix="convert or remove it"
        ) from None


def _line_number(file: str, begin: int) -> int:
    newlines, left = 0, begin
    with Path(file).open("rb") as stream:
        while left:
            data = stream.read(min(left, 1 << 24))
            newlines, left = newlines + data.count(b"\n"), left - len(data)
    return newlines + 1
