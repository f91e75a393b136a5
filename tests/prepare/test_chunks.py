"""Chunks cover the input once, in order."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanotrain.errors import DataError
from nanotrain.prepare import chunks
from nanotrain.prepare.chunks import InputChunk, plan_chunks, streamed_dataset
from nanotrain.prepare.readers import DocumentReader

TEXTS = [f"document {i} – {'ü' * (i % 7)}" for i in range(50)]


def _read(*inputs: Path, column: str = "text") -> list[str]:
    reader = DocumentReader(column)
    planned = plan_chunks([str(path) for path in inputs], subset=None, split="train")
    return [text for chunk in planned for text in reader.read(chunk)]


def _write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text(
        "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts))
    )
    return path


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks of about 100 bytes."""
    monkeypatch.setattr(chunks, "_MIN_BYTES", 100)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None
)
@given(
    texts=st.lists(st.text(min_size=1), max_size=12),
    edges=st.lists(st.integers(0, 600), max_size=8),
)
def test_ranges_of_bytes_share_the_lines_of_a_file_without_loss(
    tmp_path: Path, texts: list[str], edges: list[int]
) -> None:
    file = tmp_path / "any.jsonl"
    rows = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    file.write_bytes("".join(rows).encode("utf-8", "replace"))
    size = file.stat().st_size
    shards = sorted({0, size, *(edge for edge in edges if edge < size)})
    split = [
        InputChunk("lines", (str(file),), start, stop)
        for start, stop in zip(shards, shards[1:], strict=False)
    ]
    expected = [text.encode("utf-8", "replace").decode() for text in texts]
    assert [text for chunk in split for text in DocumentReader("text").read(chunk)] == expected


@pytest.mark.usefixtures("tiny_chunks")
def test_every_file_type_gives_every_document_in_order(tmp_path: Path) -> None:
    lines = _write_lines(tmp_path / "a.jsonl", TEXTS)
    table = pa.table({"text": TEXTS, "n": range(50)})
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=7)
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(lines.read_text())
    for name in ("a.jsonl", "b.parquet", "c.jsonl.gz"):
        planned = plan_chunks([str(tmp_path / name)], subset=None, split="train")
        assert len(planned) > 1 or name.endswith(".gz")
        assert _read(tmp_path / name) == TEXTS


def test_folders_give_their_files_sorted_and_text_files_share_chunks(tmp_path: Path) -> None:
    for i, text in enumerate(TEXTS):
        folder = tmp_path / f"{i % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"{i:02d}.txt").write_text(text)
    (tmp_path / "0" / "empty.txt").touch()
    (tmp_path / "ignored.py").write_text("no text")
    assert len(plan_chunks([str(tmp_path)], subset=None, split="train")) == 1
    assert _read(tmp_path) == TEXTS[0::2] + TEXTS[1::2]


def test_a_folder_gives_compressed_files_and_leaves_hidden_ones_out(tmp_path: Path) -> None:
    for name in (".git/a.txt", ".b.jsonl", "sub/.c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("hidden")
    _write_lines(tmp_path / "0.jsonl", TEXTS[:2])
    (tmp_path / "1.jsonl.gz").write_bytes(
        gzip.compress(_write_lines(tmp_path / ".d", TEXTS[2:5]).read_bytes())
    )
    (tmp_path / "2.txt.bz2").write_bytes(bz2.compress(TEXTS[5].encode()))
    (tmp_path / "3.TXT.XZ").write_bytes(lzma.compress(TEXTS[6].encode()))
    (tmp_path / "4.MD").write_text(TEXTS[7])
    (tmp_path / "state.json").write_text("{}")  # of a program; alone it makes no saved dataset
    (tmp_path / "4.MD.gz").write_bytes(gzip.compress(TEXTS[7].encode()))  # `gzip -k` keeps both
    assert _read(tmp_path) == TEXTS[:8]


def test_a_pattern_gives_its_matches_sorted(tmp_path: Path) -> None:
    for i in (2, 0, 1):
        _write_lines(tmp_path / f"part-{i}.jsonl", TEXTS[i : i + 1])
    (tmp_path / "part-3.jsonl").symlink_to("gone")
    assert _read(tmp_path / "part-*.jsonl") == TEXTS[:3]
    with pytest.raises(DataError, match=r"no file matches .*nope-\*"):
        _read(tmp_path / "nope-*.jsonl")


def test_a_pattern_is_not_streamed() -> None:
    with pytest.raises(DataError, match=r"a/\*\.jsonl cannot be streamed.*leave --streaming out"):
        streamed_dataset("a/*.jsonl", subset=None, split="train")


def test_a_file_whose_name_has_brackets_is_no_pattern(tmp_path: Path) -> None:
    assert _read(_write_lines(tmp_path / "a[1].jsonl", TEXTS)) == TEXTS


def test_files_have_no_subsets_and_splits(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    for part in ({"subset": None, "split": "test"}, {"subset": "en", "split": "train"}):
        with pytest.raises(DataError, match="has no effect on .*name the files"):
            plan_chunks([str(tmp_path)], **part)


def test_inputs_that_hold_nothing_or_do_not_exist_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="holds no text"):
        _read(tmp_path / "empty.txt")
    with pytest.raises(DataError, match="does not exist"):
        _read(tmp_path / "missing.jsonl")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match="pipe.txt is no file: it is a pipe or device"):
        _read(tmp_path / "pipe.txt")
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match="is not UTF-8: byte 2 is 0xff"):
        _read(tmp_path / "bad.txt")
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="is no parquet file"):
        _read(tmp_path / "bad.parquet")
    (tmp_path / "what.xyz").write_text("a")
    with pytest.raises(DataError, match="is of no supported type"):
        _read(tmp_path / "what.xyz")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.ndjson"])
def test_every_splitter_covers_its_file_whatever_the_size_of_a_chunk(
    tmp_path: Path, name: str
) -> None:
    """Also where what is left at the end is less than a chunk."""
    file = tmp_path / name
    if file.suffix == ".parquet":
        pq.write_table(pa.table({"text": TEXTS}), file, row_group_size=7)
        metadata = pq.ParquetFile(file).metadata
        end = metadata.num_row_groups
        num_bytes = sum(metadata.row_group(group).total_byte_size for group in range(end))
    else:
        end = num_bytes = _write_lines(file, TEXTS).stat().st_size
    for chunk_bytes in (1, *range(100, num_bytes + 100, 97)):
        split = chunks.SPLITTERS[file.suffix](file, chunk_bytes)
        edges = [0, *(chunk.stop for chunk in split)]
        assert [chunk.start for chunk in split] == edges[:-1] and edges[-1] == end
        assert sum(chunk.num_bytes for chunk in split) == num_bytes


def test_small_text_files_share_a_chunk_up_to_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "_MIN_BYTES", 100)
    sizes = [40, 60, 1, 99, 1, 250, 30]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_text("x" * size)
    planned = plan_chunks([str(tmp_path)], subset=None, split="train")
    assert [chunk.num_bytes for chunk in planned] == [100, 100, 1, 250, 30]
    names = [Path(name).name for chunk in planned for name in chunk.files]
    assert names == [f"{number}.txt" for number in range(len(sizes))]
