"""Read the documents of a chunk: one function per kind of input."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from nanotrain.errors import DataError
from nanotrain.prepare.chat import as_text
from nanotrain.prepare.chunks import InputChunk
from nanotrain.prepare.inputs import Limits, load_rows, open_input
from nanotrain.untrusted import parse_json

_ROWS_PER_READ = 256
_SKIPPED_BYTES = 1 << 16  # bytes skipped at a time
_BLANK_LINES = 1_000_000  # blank lines in a row, at most
_PARQUET_ROWS = 8  # rows read at a time: a dictionary may hold one long text for all of them
KINDS = {
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class DocumentReader:
    """Reads the documents of chunks from a column of their rows; keeps datasets of rows open."""

    def __init__(self, column: str, limits: Limits | None = None, *, is_chat: bool = False) -> None:
        self.column = column
        self.limits = limits or Limits()
        self.pick = pick_messages if is_chat else pick_text
        self.rows = cache(load_rows)  # loads a dataset on first use
        self.num_empty = 0  # documents without text so far
        self.num_surrogates = 0  # documents with lone surrogates so far

    def read(self, chunk: InputChunk) -> Iterator[str]:
        """The documents of a chunk, in order, without empty ones.

        Lone surrogates become question marks.

        Raises:
            DataError: unreadable text, broken JSON, no such column, or more than the limits.
        """
        for text in READERS[chunk.kind](self, chunk):
            self.limits.check_document(", ".join(chunk.files) or "the dataset", len(text))
            if not text:
                self.num_empty += 1
                continue
            valid = text.encode("utf-8", "replace").decode()
            if valid != text:  # JSON can hold lone surrogates, which no tokenizer can encode
                self.num_surrogates += 1
            yield valid


def pick_text(
    row: Mapping[str, Any], column: str, *, source: str, columns: Sequence[str] | None = None
) -> str:
    """Get the text of a row; empty for null.

    Args:
        row: column name -> value.
        column: name of the column with the text.
        source: file or dataset of the row, for the error.
        columns: all columns, if the row holds only the one with the text.

    Raises:
        DataError: no such column, or no text in it.
    """
    names = ", ".join(columns or row)
    if column not in row:
        raise DataError(
            f"{source} has no column {column}",
            why=f"its columns are {names}",
            fix="name one with --text-column",
        )
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(
            f"{source} holds no text in column {column}",
            why=f"it holds {_kind(text)}; the columns are {names}",
            fix="name a column of strings with --text-column",
        )
    return text


def _kind(value: Any) -> str:
    """Name of a value's type in error messages."""
    return KINDS.get(type(value), type(value).__name__)


def pick_messages(
    row: Mapping[str, Any], column: str, *, source: str, columns: Sequence[str] | None = None
) -> str:
    """Get the messages of a row as JSON; empty for null. Arguments and errors: see `pick_text`."""
    messages = row.get(column)
    if isinstance(messages, list):
        return as_text(messages)
    return pick_text(row, column, source=source, columns=columns)


def _read_text(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    limits = reader.limits
    for file in chunk.files:
        most = limits.file_bytes(file)
        with open_input(file) as stream:
            data = stream.read(min(limits.document_bytes, most) + 1)
        limits.check_file(file, len(data), most=most)
        limits.check_document(file, len(data))
        try:
            # without the mark that some editors write before the text
            yield data.decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            why = f"byte {error.start} is {data[error.start]:#04x}"
            raise DataError(f"{file} is not UTF-8", why=why, fix="convert or remove it") from None


def _read_lines(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    file = chunk.files[0]
    limits = reader.limits
    most = limits.file_bytes(file)
    num_blank = 0
    with open_input(file) as stream:
        if chunk.start:
            # A line belongs to the chunk it starts in: skip to the first newline from the byte
            # before the chunk on.
            stream.seek(chunk.start - 1)
            while (rest := stream.readline(_SKIPPED_BYTES)) and not rest.endswith(b"\n"):
                limits.check_document(file, stream.tell() - chunk.start)
        while (begin := stream.tell()) < chunk.stop:
            line = stream.readline(min(limits.document_bytes, max(0, most - begin)) + 1)
            limits.check_file(file, begin + len(line), most=most)
            limits.check_document(file, len(line))
            if not line:
                return
            if line.strip():
                num_blank = 0
                yield _read_line(line, reader, file=file, begin=begin)
                continue
            num_blank += 1
            if num_blank > _BLANK_LINES:
                raise DataError(
                    f"{file} has more than {_BLANK_LINES:,} blank lines in a row",
                    why="they take the time of documents and hold none",
                    fix="remove them",
                )


def _read_line(line: bytes, reader: DocumentReader, *, file: str, begin: int) -> str:
    """The text of a line that begins at a byte of a file."""
    try:
        row = parse_json(line, allow_nan=True)
        if not isinstance(row, dict):
            raise ValueError(f"it is {_kind(row)}")
    except ValueError as error:
        raise DataError(
            f"{file} line {_line_number(file, begin)} is no JSON object",
            why=str(error),
            fix='write each document as {"text": "..."}, or remove the line',
        ) from None
    if isinstance(row.get(reader.column), str):
        return str(row[reader.column])
    return reader.pick(row, reader.column, source=f"{file} line {_line_number(file, begin)}")


def _read_parquet(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    import pyarrow.parquet

    column = reader.column
    source = chunk.files[0]
    with open_input(source) as stream:
        file = pyarrow.parquet.ParquetFile(stream)
        names = file.schema_arrow.names
        if column not in names:
            reader.pick(dict.fromkeys(names), column, source=source)
        groups = range(chunk.start, chunk.stop)
        most = reader.limits.file_bytes(source)
        stored = sum(file.metadata.row_group(group).total_byte_size for group in groups)
        reader.limits.check_file(source, stored, most=most)
        total = 0
        for batch in file.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=[column]):
            for value in batch.column(0):
                text = reader.pick({column: value.as_py()}, column, source=source, columns=names)
                total += len(text)
                reader.limits.check_file(source, total, most=most)
                yield text


def _read_rows(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    assert chunk.dataset is not None, "a chunk of rows has a dataset"
    rows = reader.rows(chunk.dataset)
    column = reader.column
    names = rows.column_names
    source = chunk.files[0] if chunk.files else chunk.dataset.name
    if column not in names:
        reader.pick(dict.fromkeys(names), column, source=source)
    selected = rows.select(range(chunk.start, chunk.stop)).select_columns([column])
    for batch in selected.iter(_ROWS_PER_READ):
        for text in batch[column]:
            yield reader.pick({column: text}, column, source=source, columns=names)


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
    """The number of the line that begins at a byte of a file."""
    num_newlines = 0
    left = begin
    with open_input(file) as stream:
        while left:
            data = stream.read(min(left, 1 << 24))
            num_newlines += data.count(b"\n")
            left -= len(data)
    return num_newlines + 1
