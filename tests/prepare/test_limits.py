"""Small files that hold more than the memory: one error that names the limit and the flag that
raises it.
"""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from nanotrain.cli.main import main
from nanotrain.errors import DataError
from nanotrain.prepare import inputs, readers
from nanotrain.prepare.chunks import plan_chunks
from nanotrain.prepare.inputs import Limits
from nanotrain.prepare.parts import _next_texts
from nanotrain.prepare.readers import DocumentReader

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
INFLATED = 2 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "ALWAYS_BYTES", 1 << 20)


def read(file: Path, **limits: int) -> list[str]:
    reader = DocumentReader("text", Limits(**limits))
    return [
        text
        for chunk in plan_chunks([str(file)], subset=None, split="train")
        for text in reader.read(chunk)
    ]


@pytest.mark.parametrize("ending", COMPRESSORS)
@pytest.mark.parametrize(("name", "byte"), [("a.txt", b"a"), ("a.jsonl", b" ")])
def test_a_compressed_file_holds_a_multiple_of_its_size(
    tmp_path: Path, ending: str, name: str, byte: bytes
) -> None:
    file = tmp_path / f"{name}{ending}"
    file.write_bytes(COMPRESSORS[ending](byte * INFLATED))
    with pytest.raises(DataError, match=f"{name}.* holds more than .* raise --max-inflation"):
        read(file)
    assert len("".join(read(file, inflation=10**6))) == (INFLATED if byte == b"a" else 0)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_parquet_file_too_stored_or_as_rows_of_one_long_text(tmp_path: Path, rows: int) -> None:
    text = "a" * (INFLATED // rows)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(DataError, match="a.parquet holds more than .* raise --max-inflation"):
        read(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", inflation=10**6) == [text] * rows


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_document_has_a_limit(tmp_path: Path, name: str) -> None:
    file, row = tmp_path / name, {"text": "a" * 1000}
    if name == "a.parquet":
        pq.write_table(pa.table({"text": [row["text"]]}), file)
    else:
        text = row["text"].encode() if name == "a.txt" else json.dumps(row).encode()
        file.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    with pytest.raises(
        DataError, match="a document of .* has more than 999 bytes: .* raise --max-document-bytes"
    ):
        read(file, document_bytes=999)
    assert read(file, document_bytes=1012) == [row["text"]]


def test_a_sparse_file_is_one_error_in_every_chunk(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 34)
        for chunk in plan_chunks([str(tmp_path / name)], subset=None, split="train")[:2]:
            with pytest.raises(DataError, match="raise --max-document-bytes"):
                list(DocumentReader("text", Limits(document_bytes=1 << 20)).read(chunk))


def test_blank_lines_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_BLANK_LINES", 10)
    (tmp_path / "a.jsonl").write_text("\n" * 10 + '{"text": "a"}' + "\n" * 11)
    assert read(tmp_path / "a.jsonl") == ["a"]
    (tmp_path / "a.jsonl").write_text("\n" * 12 + '{"text": "a"}')
    with pytest.raises(DataError, match="more than 10 blank lines in a row"):
        read(tmp_path / "a.jsonl")


def test_few_long_documents_are_tokenized_at_a_time() -> None:
    texts = iter(["a" * (1 << 20), "bb", "c" * (1 << 20), *["d"] * 100])
    assert [len(_next_texts(texts)) for _ in range(5)] == [2, 2, 64, 35, 0]


def test_the_flags_raise_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt.gz").write_bytes(gzip.compress(b"a" * (24 << 20)))  # a worker has the real limit
    line = [
        "prepare",
        "--input",
        "a.txt.gz",
        "--output",
        "c",
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
    ]
    assert main(line) == 2 and "raise --max-inflation" in capfd.readouterr().err
    assert main([*line, "--max-inflation", "0"]) == 2 and "at least 1" in capfd.readouterr().err
    assert main([*line, "--max-inflation", "2000", "--max-document-bytes", "99"]) == 2
    assert "more than 99 bytes" in capfd.readouterr().err
