"""Readers give every document of a chunk as encodable text, and name what they cannot read."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanotrain.errors import DataError
from nanotrain.prepare import readers
from nanotrain.prepare.chunks import InputChunk, plan_chunks
from nanotrain.prepare.inputs import HubDataset
from nanotrain.prepare.readers import DocumentReader


def _read(path: Path, *, column: str = "text") -> list[str]:
    reader = DocumentReader(column)
    return [
        text
        for chunk in plan_chunks([str(path)], subset=None, split="train")
        for text in reader.read(chunk)
    ]


def test_rows_without_text_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n\n{"text": null}\n{"text": ""}\n{"text": "b"}')
    assert _read(file) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"a\.jsonl line 3 is no JSON"),
        ("[1]", r"line 3 is no JSON object.*a list"),
        (
            '{"body": "a", "id": 1}',
            r"line 3 has no column text: its columns are body, id; name one with --text-column",
        ),
        ('{"text": 5}', r"line 3 holds no text in column text: it holds a number"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        _read(file)


def test_a_column_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="no column text: its columns are body, n"):
        _read(tmp_path / "b.parquet")
    with pytest.raises(
        DataError, match="no text in column n: it holds a number; the columns are body, n"
    ):
        _read(tmp_path / "b.parquet", column="n")


def test_a_lone_surrogate_becomes_a_question_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')
    assert _read(file) == ["a?b", "😀"]


def test_the_mark_before_utf8_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert _read(tmp_path / "a.txt") == _read(tmp_path / "a.jsonl") == ["a"]


def test_rows_of_a_dataset_are_loaded_once_per_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[HubDataset] = []

    class Rows(list[str]):
        column_names = ("text",)

        def select(self, numbers: range) -> "Rows":
            return Rows(self[number] for number in numbers)

        def select_columns(self, names: list[str]) -> "Rows":
            return self

        def iter(self, size: int) -> list[dict[str, list[str]]]:
            return [{"text": list(self)}]

    def load(dataset: HubDataset) -> Rows:
        loads.append(dataset)
        return Rows("abcd")

    monkeypatch.setattr(readers, "load_rows", load)
    dataset, reader = HubDataset("any", None, "train"), DocumentReader("text")
    chunks = [InputChunk("rows", start=start, stop=start + 2, dataset=dataset) for start in (0, 2)]
    assert [text for chunk in chunks for text in reader.read(chunk)] == list("abcd")
    assert loads == [dataset]
