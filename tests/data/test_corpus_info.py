"""The info of a corpus: written, read, and the tokenizer it names."""

import json
from pathlib import Path

import pytest

from nanotrain.data.corpus_info import (
    CorpusInfo,
    read_info,
    recorded_tokenizer,
    write_info,
)
from nanotrain.errors import DataError


def test_a_written_info_reads_back_and_a_missing_one_is_empty(tmp_path: Path) -> None:
    info = CorpusInfo("bytes", 257, 256, documents=3, tokens=10, plan="abc")
    write_info(tmp_path / "web", info)
    assert read_info(tmp_path / "web") == info
    assert read_info(tmp_path / "megatron") == CorpusInfo()
    assert [file.name for file in tmp_path.iterdir()] == ["web.nanotrain.json"]


def test_the_tokenizer_is_found_beside_the_pair_wherever_the_folder_moves(tmp_path: Path) -> None:
    write_info(tmp_path / "web", CorpusInfo("web.tokenizer", 300, 0))
    write_info(tmp_path / "raw", CorpusInfo("bytes", 257, 256))
    assert recorded_tokenizer(tmp_path / "web") == str(tmp_path / "web.tokenizer")
    assert recorded_tokenizer(tmp_path / "raw") == "bytes"
    assert recorded_tokenizer(tmp_path / "megatron") is None


def test_a_record_that_cannot_be_read_is_an_error_with_a_cure(tmp_path: Path) -> None:
    (tmp_path / "web.nanotrain.json").write_text("{")
    with pytest.raises(DataError, match=r"web\.nanotrain\.json cannot be read.*--tokenizer-model"):
        recorded_tokenizer(tmp_path / "web")


@pytest.mark.parametrize(
    ("name", "value"), [("eod", 255), ("vocab_size", 258), ("documents", 2), ("eod", None)]
)
def test_a_value_that_was_not_written_is_damage(
    name: str, value: int | None, tmp_path: Path
) -> None:
    write_info(tmp_path / "web", CorpusInfo("bytes", 257, 256, documents=3))
    file = tmp_path / "web.nanotrain.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {name: value}))
    with pytest.raises(DataError, match="its values are not those that were written"):
        read_info(tmp_path / "web")
    del values["sha256"]  # as earlier versions wrote it
    file.write_text(json.dumps(values | {name: value}))
    assert getattr(read_info(tmp_path / "web"), name) == value


def test_a_corpus_names_no_tokenizer_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("org/model", "../other", "s3://host/x"):
        write_info(tmp_path / "web", CorpusInfo(name, 300, 0))
        with pytest.raises(DataError, match="tokenizer is .*, it must be a plain file name"):
            recorded_tokenizer(tmp_path / "web")
    write_info(tmp_path / "web", CorpusInfo("gpt2", 300, 0))
    assert recorded_tokenizer(tmp_path / "web") == str(tmp_path / "gpt2")
    # also where the path of the corpus is relative, and the folder is missing: gpt2 is on the hub
    monkeypatch.chdir(tmp_path)
    assert recorded_tokenizer("web") == str(tmp_path / "gpt2")
    (tmp_path / "gpt2").mkdir()
    assert recorded_tokenizer("web") == "gpt2"
