"""Read the documents of a chunk: one function per kind of input."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nanotrain.errors import DataError
from nanotrain.prepare.chunks import InputChunk
from nanotrain.prepare.inputs import HubDataset, load_rows, open_input
from nanotrain.untrusted import parse_json

_ROWS_PER_READ = 256
KINDS = {int: "a number", float: "a number", bool: "true or false", list: "a list", dict: "an object"}


class DocumentReader:
    """Reads the documents of chunks from a column of their rows; keeps a dataset of rows open between its chunks."""

    def __init__(self, column: str) -> None:
        self.column = column
        self._rows: dict[HubDataset, Any] = {}

    def read(self, chunk: InputChunk) -> Iterator[str]:
        """The documents of a chunk, in order, without empty ones; lone surrogates become question marks.

        Raises:
            DataError: unreadable text, broken JSON, or no such column.
        """
        # JSON can hold lone surrogates, which no tokenizer can encode.
        return (text.encode("utf-8", "replace").decode() for text in READERS[chunk.kind](self, chunk) if text)

    def rows(self, dataset: HubDataset) -> Any:
        """The rows of a dataset, loaded on first use."""
        if dataset not in self._rows:
            self._rows[dataset] = load_rows(dataset)
        return self._rows[dataset]


def pick_text(row: Mapping[str, Any], column: str, *, source: str, columns: Sequence[str] | None = None) -> str:
    """Get the text of a row; empty for null.

    Args:
        row: column name -> value.
        source: file or dataset of the row, for the error.
        columns: all columns, if the row holds only that of the text.

    Raises:
        DataError: no such column, or no text in it.
    """
    names = ", ".join(columns or row)
    if column not in row:
        raise DataError(
            f"{source} has no column {column}", why=f"its columns are {names}", fix="name one with --text-column"
        )
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(
            f"{source} holds no text in column {column}",
            why=f"it holds {KINDS.get(type(text), type(text).__name__)}; the columns are {names}",
            fix="name a column of strings with --text-column",
        )
    return text


def _read_text(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    for file in chunk.files:
        with open_input(file) as stream:
            data = stream.read()
        try:
            yield data.decode("utf-8").removeprefix("\ufeff")  # the mark that some editors write before the text
        except UnicodeDecodeError as error:
            why = f"byte {error.start} is {data[error.start]:#04x}"
            raise DataError(f"{file} is not UTF-8", why=why, fix="convert or remove it") from None


def _read_lines(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    file = chunk.files[0]
    with open_input(file) as stream:
        if chunk.start:
            # A line belongs to the chunk it starts in: skip to the first newline from the byte before the chunk on.
            stream.seek(chunk.start - 1)
            stream.readline()
        while (begin := stream.tell()) < chunk.stop:
            line = stream.readline()
            if not line:
                return
            if line.strip():
                yield _text_of_line(line, reader.column, file=file, begin=begin)


def _text_of_line(line: bytes, column: str, *, file: str, begin: int) -> str:
    try:
        row = parse_json(line, allow_nan=True)
        if not isinstance(row, dict):
            raise ValueError(f"it is {KINDS.get(type(row), type(row).__name__)}")
    except ValueError as error:
        raise DataError(
            f"{file} line {_line_number(file, begin)} is no JSON object",
            why=str(error),
            fix='write each document as {"text": "..."}, or remove the line',
        ) from None
    if isinstance(row.get(column), str):
        return str(row[column])
    return pick_text(row, column, source=f"{file} line {_line_number(file, begin)}")


def _read_parquet(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    import pyarrow.parquet

    column, source = reader.column, chunk.files[0]
    with open_input(source) as stream:
        file = pyarrow.parquet.ParquetFile(stream)
        names = file.schema_arrow.names
        if column not in names:
            pick_text(dict.fromkeys(names), column, source=source)
        groups = range(chunk.start, chunk.stop)
        for batch in file.iter_batches(_ROWS_PER_READ, row_groups=groups, columns=[column]):
            for text in batch.column(0).to_pylist():
                yield pick_text({column: text}, column, source=source, columns=names)


def _read_rows(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    assert chunk.dataset is not None, "a chunk of rows has a dataset"
    rows, column = reader.rows(chunk.dataset), reader.column
    source = chunk.files[0] if chunk.files else chunk.dataset.name
    if column not in rows.column_names:
        pick_text(dict.fromkeys(rows.column_names), column, source=source)
    for batch in rows.select(range(chunk.start, chunk.stop)).select_columns([column]).iter(_ROWS_PER_READ):
        for text in batch[column]:
            yield pick_text({column: text}, column, source=source, columns=rows.column_names)


def _read_texts(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    yield from chunk.texts


READERS: dict[str, Callable[[DocumentReader, InputChunk], Iterator[str]]] = {
    "text": _read_text,
    "lines": _read_lines,
    "parquet": _read_parquet,
    "rows": _read_rows,
    "texts": _read_texts,
}


def _line_number(file: str, begin: int) -> int:
    newlines, left = 0, begin
    with open_input(file) as stream:
        while left:
            data = stream.read(min(left, 1 << 24))
            newlines, left = newlines + data.count(b"\n"), left - len(data)
    return newlines + 1
