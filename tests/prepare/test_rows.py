"""Rows of other programs give their text or messages by stated rules."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanotrain.errors import DataError
from nanotrain.prepare.chunks import plan_chunks
from nanotrain.prepare.readers import DocumentReader
from nanotrain.prepare.rows import pick_messages, pick_text

TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def read(path: Path, column: str = "text", *, is_chat: bool = False) -> list[str]:
    reader = DocumentReader(column, is_chat=is_chat)
    chunks = plan_chunks([str(path)], subset=None, split="train")
    return [text for chunk in chunks for text in reader.read(chunk)]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_dotted_column_is_a_field_of_an_object(tmp_path: Path, suffix: str) -> None:
    rows = [{"content": {"text": "a", "lang": "en"}, "id": 1}, {"content": None, "id": 2}]
    file = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        text = "\n".join(map(json.dumps, rows)) if suffix == "jsonl" else json.dumps(rows)
        file.write_text(text)
    assert read(file, "content.text") == ["a"]
    with pytest.raises(DataError, match="has no column text: its columns are content"):
        read(file)


def test_a_field_with_a_dot_in_its_name_comes_first() -> None:
    assert pick_text({"a.b": "whole", "a": {"b": "part"}}, "a.b", source="f") == "whole"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"instruction": "2 + 2?", "input": "", "output": "4"},
    ],
)
def test_sharegpt_and_alpaca_are_conversations(row: dict[str, object], tmp_path: Path) -> None:
    assert json.loads(pick_messages(row, "messages", source="f")) == TALK
    pq.write_table(pa.Table.from_pylist([{**row, "id": 3}]), tmp_path / "a.parquet")
    (text,) = read(tmp_path / "a.parquet", "messages", is_chat=True)
    assert json.loads(text) == TALK
    with pytest.raises(DataError, match="has no column text.*read conversations with --format"):
        pick_text(row, "text", source="f")


def test_the_input_of_alpaca_follows_its_instruction() -> None:
    row = {"system": "Be brief.", "instruction": "Add.", "input": "2 + 2", "output": "4"}
    roles = json.loads(pick_messages(row, "messages", source="f"))
    assert [message["content"] for message in roles] == ["Be brief.", "Add.\n\n2 + 2", "4"]
    assert roles[0]["role"] == "system"


def test_what_a_document_does_not_need_does_not_refuse_it(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [
        b'{"text": "a", "deep": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"text": "b", "id": ' + b"9" * 5000 + b"}",
        b'{"text": "c", "name": "\xff"}',
        b'{"text": "d", "score": NaN}',
    ]
    file.write_bytes(b"\n".join(lines))
    assert read(file) == ["a", "b", "c", "d"]
    file.write_bytes(b'{"text": "\xff"}')
    with pytest.raises(DataError, match="line 1 is no JSON object"):
        read(file)


def test_columns_of_csv_are_the_text_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    rows = "".join(f"text {number},{number}\n" for number in range(50))
    file.write_text(f"text,id\nNA,1\nnull,x\n12,\n{rows}")
    assert read(file)[:4] == ["NA", "null", "12", "text 0"]


def test_a_json_file_has_a_list_an_object_or_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    rows = [{"text": "a", "meta": 1}, {"text": "b", "meta": "x"}]
    for content in (json.dumps(rows, indent=1), "\n".join(map(json.dumps, rows))):
        file.write_text(content)
        assert read(file) == ["a", "b"]
    file.write_text(json.dumps(rows[0], indent=1))
    assert read(file) == ["a"]
    file.write_text("[1]")
    with pytest.raises(DataError, match="a.json is no list of JSON objects: a row is 1"):
        read(file)
