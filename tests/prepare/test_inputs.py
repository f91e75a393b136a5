"""Compressed inputs give their text, and one that cannot be read is named."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest
import zstandard

from nanotrain.errors import DataError
from nanotrain.prepare import inputs as compressed
from nanotrain.prepare.inputs import HubDataset, load_rows, open_input


def _read(file: Path) -> bytes:
    with open_input(str(file)) as stream:
        return stream.read()


def test_a_damaged_compressed_file_is_named(tmp_path: Path) -> None:
    complete = gzip.compress(b'{"text": "a"}\n' * 1000)
    for name, data in (
        ("cut.jsonl.gz", complete[:-20]),
        ("other.jsonl.gz", b"no gzip"),
        ("other.txt.xz", b"no xz"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            _read(tmp_path / name)


def test_zst_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "find_spec", lambda name: None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"any")
    with pytest.raises(DataError, match="zstandard is not installed; pip install zstandard"):
        _read(tmp_path / "a.jsonl.zst")


def test_a_cut_zst_is_named(tmp_path: Path) -> None:
    complete = zstandard.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(50_000)))
    (tmp_path / "cut.jsonl.zst").write_bytes(complete[: len(complete) // 2])
    with pytest.raises(DataError, match=r"cut\.jsonl\.zst cannot be read.*ends too early"):
        _read(tmp_path / "cut.jsonl.zst")
    (tmp_path / "cut.jsonl.zst").write_bytes(complete)
    assert _read(tmp_path / "cut.jsonl.zst").endswith(b'"49999"}\n')
    with open_input(str(tmp_path / "cut.jsonl.zst")) as stream:
        assert stream.readline() and stream.tell() == len(b'{"text": "0"}\n')


def test_zst_is_read_over_all_its_frames(tmp_path: Path) -> None:
    compress = zstandard.compress
    (tmp_path / "a.jsonl.zst").write_bytes(
        b"".join(compress(b'{"text": "%d"}\n' % i) for i in range(3))
    )
    assert _read(tmp_path / "a.jsonl.zst") == b'{"text": "0"}\n{"text": "1"}\n{"text": "2"}\n'


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_a_csv_file(tmp_path: Path, streaming: bool) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text,n\nhello,1\nworld,2\n")
    rows = load_rows(HubDataset("csv", None, "train", (str(file),)), streaming=streaming)
    assert [row["text"] for row in rows] == ["hello", "world"]


def test_an_unknown_dataset_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="the dataset no/such cannot be loaded.*--split-name"):
        load_rows(HubDataset("no/such", None, "train"))


@pytest.mark.parametrize("streaming", [False, True])
def test_pickles_in_a_tar_file_are_left_as_bytes(
    tmp_path: Path, streaming: bool, monkeypatch
) -> None:
    monkeypatch.setattr("torch.load", None)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("0.txt", b"hello"), ("0.pth", b"a pickle")):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    rows = load_rows(
        HubDataset("webdataset", None, "train", (str(tmp_path / "a.tar"),)), streaming=streaming
    )
    assert [(row["txt"], row["pth"]) for row in rows] == [("hello", b"a pickle")]


def test_a_dataset_that_was_saved_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    train, test = (
        datasets.Dataset.from_dict({"text": ["a", "b"]}),
        datasets.Dataset.from_dict({"text": ["c"]}),
    )
    train.save_to_disk(tmp_path / "train")
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "both")
    assert load_rows(HubDataset(str(tmp_path / "train"), None, "train"))["text"][:] == ["a", "b"]
    assert load_rows(HubDataset(str(tmp_path / "both"), None, "test"))["text"][:] == ["c"]
    assert [
        row["text"]
        for row in load_rows(HubDataset(str(tmp_path / "train"), None, "train"), streaming=True)
    ] == [
        "a",
        "b",
    ]
    with pytest.raises(
        DataError,
        match="has no split valid: it is one dataset without splits; leave --split-name out",
    ):
        load_rows(HubDataset(str(tmp_path / "train"), None, "valid"))
    with pytest.raises(
        DataError,
        match="has no split valid: its splits are train, test; name one with --split-name",
    ):
        load_rows(HubDataset(str(tmp_path / "both"), None, "valid"))
