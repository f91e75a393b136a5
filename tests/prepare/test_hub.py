"""Rows of local files by their type, streamed or not, and one error for a dataset that cannot be loaded."""

import io
import tarfile
from pathlib import Path

import pytest

from nanotrain.errors import DataError
from nanotrain.prepare.hub import HubDataset, load_rows


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
def test_pickles_in_a_tar_file_are_left_as_bytes(tmp_path: Path, streaming: bool, monkeypatch) -> None:
    monkeypatch.setattr("torch.load", None)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("0.txt", b"hello"), ("0.pth", b"a pickle")):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    rows = load_rows(HubDataset("webdataset", None, "train", (str(tmp_path / "a.tar"),)), streaming=streaming)
    assert [(row["txt"], row["pth"]) for row in rows] == [("hello", b"a pickle")]


def test_a_dataset_that_was_saved_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    one, two = datasets.Dataset.from_dict({"text": ["a", "b"]}), datasets.Dataset.from_dict({"text": ["c"]})
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(tmp_path / "both")
    assert load_rows(HubDataset(str(tmp_path / "one"), None, "train"))["text"][:] == ["a", "b"]
    assert load_rows(HubDataset(str(tmp_path / "both"), None, "test"))["text"][:] == ["c"]
    assert [row["text"] for row in load_rows(HubDataset(str(tmp_path / "one"), None, "train"), streaming=True)] == [
        "a",
        "b",
    ]
    with pytest.raises(DataError, match="has no split valid: it is one dataset without splits; leave --split-name out"):
        load_rows(HubDataset(str(tmp_path / "one"), None, "valid"))
    with pytest.raises(DataError, match="has no split valid: its splits are train, test; name one with --split-name"):
        load_rows(HubDataset(str(tmp_path / "both"), None, "valid"))
