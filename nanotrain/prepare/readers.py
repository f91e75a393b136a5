"""Read the documents of a chunk: one function per kind of input."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from nanotrain.errors import DataError
from nanotrain.prepare.chunks import InputChunk
from nanotrain.prepare.inputs import Limits, load_rows, open_input
from nanotrain.prepare.rows import columns_to_read, kind_of, pick_messages, pick_text, value_at
from nanotrain.untrusted import MAX_FILE_BYTES, MAX_LINE, object_of, parse_json

_ROWS_PER_READ = 256
_NUM_SETS = 4  # sets of columns that are named
_SKIPPED_BYTES = 1 << 16  # bytes skipped at a time
_BLANK_LINES = 1_000_000  # blank lines in a row, at most
_ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that are no UTF-8, as Python escapes them
_PARQUET_ROWS = 8  # rows read at a time: a dictionary may hold one long text for all of them


class DocumentReader:
    """Reads the documents of chunks from a column of their rows; keeps datasets of rows open."""

    def __init__(self, column: str, limits: Limits | None = None, *, is_chat: bool = False) -> None:
        self.column = column
        self.limits = limits or Limits()
        self.is_chat = is_chat
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

    def columns_in(self, names: Sequence[str], source: str) -> list[str]:
        """The columns to read of rows with these columns.

        Raises:
            DataError: none holds the text or the messages.
        """
        columns = columns_to_read(names, self.column, is_chat=self.is_chat)
        if not columns:
            self.pick(dict.fromkeys(names), self.column, source=source)
        return columns


def _read_text(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    """The content of each file of a chunk as one document."""
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
    """The documents of the lines that start within the bytes of a chunk."""
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
        row = _parse_row(line, reader.column)
        if not isinstance(row, dict):
            raise ValueError(f"it is {kind_of(row)}")
    except ValueError as error:
        raise DataError(
            f"{file} line {_line_number(file, begin)} is no JSON object",
            why=str(error),
            fix='write each document as {"text": "..."}, or remove the line',
        ) from None
    try:
        return reader.pick(row, reader.column, source=file)
    except DataError:  # only now is the line counted, which reads the file from its first byte
        return reader.pick(row, reader.column, source=f"{file} line {_line_number(file, begin)}")


def _parse_row(line: bytes, column: str) -> Any:
    """The value of a line; other fields than the document's may be too deep, too long or no UTF-8.

    Raises:
        ValueError: no JSON, or a text that is no UTF-8.
    """
    try:
        return parse_json(line, allow_nan=True)
    except ValueError as error:
        try:
            text = line.decode("utf-8", "surrogateescape")
            row = json.loads(text, parse_int=str, parse_float=str)
        except (ValueError, RecursionError):
            raise error from None
        value = value_at(row, column) if isinstance(row, dict) else None
        if not isinstance(value, str) or _ESCAPED.search(value):
            raise
        return row


def _read_json(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    """The rows of a file that is one JSON list or object."""
    (source,) = chunk.files
    most = reader.limits.file_bytes(source)
    try:
        with open_input(source) as stream:
            content = stream.read(min(most, MAX_FILE_BYTES) + 1)
        reader.limits.check_file(source, len(content), most=min(most, MAX_FILE_BYTES))
        value = parse_json(content, allow_nan=True)
        for row in value if isinstance(value, list) else [value]:
            row = object_of(row, "a row")
            yield reader.pick(row, reader.column, source=source)
    except ValueError as error:
        raise DataError(
            f"{source} is no list of JSON objects",
            why=str(error),
            fix='write each document as {"text": "..."}, one per line in a .jsonl file',
        ) from None


def _read_parquet(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    """The documents of the row groups of a chunk."""
    import pyarrow.parquet

    column = reader.column
    source = chunk.files[0]
    with open_input(source) as stream:
        file = pyarrow.parquet.ParquetFile(stream)
        names = file.schema_arrow.names
        columns = reader.columns_in(names, source)
        groups = range(chunk.start, chunk.stop)
        most = reader.limits.file_bytes(source)
        stored = sum(file.metadata.row_group(group).total_byte_size for group in groups)
        reader.limits.check_file(source, stored, most=most)
        total = 0
        for batch in file.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=columns):
            for row in batch.to_pylist():
                text = reader.pick(row, column, source=source, columns=names)
                total += len(text)
                reader.limits.check_file(source, total, most=most)
                yield text


def _read_rows(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    """The documents of the rows of a chunk of a dataset."""
    assert chunk.dataset is not None, "a chunk of rows has a dataset"
    rows = reader.rows(chunk.dataset)
    column = reader.column
    names = rows.column_names
    source = chunk.files[0] if chunk.files else chunk.dataset.name
    columns = reader.columns_in(names, source)
    selected = rows.select(range(chunk.start, chunk.stop)).select_columns(columns)
    for batch in selected.iter(_ROWS_PER_READ):
        for values in zip(*(batch[name] for name in columns), strict=True):
            row = dict(zip(columns, values, strict=True))
            yield reader.pick(row, column, source=source, columns=names)


def _read_texts(reader: DocumentReader, chunk: InputChunk) -> Iterator[str]:
    yield from chunk.texts


READERS: dict[str, Callable[[DocumentReader, InputChunk], Iterator[str]]] = {
    "text": _read_text,
    "lines": _read_lines,
    "json": _read_json,
    "parquet": _read_parquet,
    "rows": _read_rows,
    "texts": _read_texts,
}


def lines_on_columns(
    chunks: Sequence[InputChunk], column: str, *, is_chat: bool = False
) -> list[str]:
    """The lines that say which columns of the rows are read, one per set of columns."""
    lines: dict[tuple[str, ...], str] = {}
    for chunk in chunks:
        names = chunk.columns
        if chunk.kind == "lines" and chunk.start == 0 and len(lines) < _NUM_SETS:
            names = _columns_of_line(chunk.files[0])
        columns = columns_to_read(names, column, is_chat=is_chat)
        others = [name for name in names if name not in columns]
        if columns and names not in lines:
            source = chunk.files[0] if chunk.files else "the dataset"
            unread = f"; not read: {', '.join(others)}" if others else ""
            read = column if columns == [column.partition(".")[0]] else ", ".join(columns)
            lines[names] = f"{source}: documents are read from {read}{unread}"
    return list(lines.values())[:_NUM_SETS]


def _columns_of_line(file: str) -> tuple[str, ...]:
    """The columns of the first line; () where it cannot be read, which is reported later."""
    with open_input(file) as stream:
        line = stream.readline(MAX_LINE)
    try:
        return tuple(object_of(parse_json(line, allow_nan=True), "it"))
    except ValueError:
        return ()


def _line_number(file: str, begin: int) -> int:
    """The number of the line that begins at a byte of a file."""
    num_newlines = 0
    num_bytes = begin
    with open_input(file) as stream:
        while num_bytes:
            data = stream.read(min(num_bytes, 1 << 24))
            num_newlines += data.count(b"\n")
            num_bytes -= len(data)
    return num_newlines + 1
