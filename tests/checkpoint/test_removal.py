"""Retention and clean-up delete the files of nanotrain and no others."""

import logging
from pathlib import Path

import pytest
import torch

from nanotrain.checkpoint import store
from tests.checkpoint.test_store import BOX, checkpointer, save, value


def test_a_file_that_a_user_put_into_a_checkpoint_is_never_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "notes.txt").write_text("mine")
    unfinished = tmp_path / "checkpoints" / "step-00000009.tmp" / "work"
    unfinished.mkdir(parents=True)
    writer = checkpointer(tmp_path, keep_last=1)
    with caplog.at_level(logging.WARNING, logger="nanotrain"):
        for step in (3, 4):
            writer.save(step, {BOX: torch.full((64,), float(step))}, objects={}, config={}, topology={})

    assert unfinished.is_dir()
    notes = {path.parent.name: path.read_text() for path in tmp_path.glob("checkpoints/*/notes.txt")}
    assert notes == {"step-00000001.deleted": "mine", "step-00000002.deleted": "mine"}
    assert not list(tmp_path.glob("checkpoints/*.deleted/*.safetensors")), "what nanotrain wrote is gone"
    assert sum("it holds notes.txt, which nanotrain did not write" in message for message in caplog.messages) == 2
    assert len(caplog.messages) == 3, "one warning each"


@pytest.mark.parametrize("leftover", ["step-00000002.tmp", "step-00000002.replaced"])
def test_a_leftover_with_a_file_of_a_user_never_stops_a_save_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leftover: str
) -> None:
    monkeypatch.setattr(store, "swap_names", lambda first, second: False)
    save(tmp_path, 2)
    folder = tmp_path / "checkpoints"
    (folder / leftover).mkdir()
    (folder / leftover / "notes.txt").write_text("mine")
    tensors = {BOX: torch.full((64,), 7.0)}
    saved = checkpointer(tmp_path).save(2, tensors, objects={}, config={}, topology={})
    assert value(tmp_path, saved) == 7.0
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000002.deleted"]
    assert (folder / "step-00000002.deleted" / "notes.txt").read_text() == "mine"
