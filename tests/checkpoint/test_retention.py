"""Retention and clean-up delete what they should, files of nanotrain and no others."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.checkpoint import commit, retention, store
from nanotrain.checkpoint.retention import keep_newest, surplus
from tests.checkpoint.test_store import BOX, checkpointer, save, truncate, value


def test_odd_neighbours_never_stop_a_save_and_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    elsewhere = save(tmp_path, 1).rename(tmp_path / "elsewhere")
    (folder / "step-00000001").symlink_to(elsewhere)
    (folder / "step-00000002").write_text("a file")
    (folder / "step-00000003.deleted").mkdir()
    (folder / "step-00000004").symlink_to(tmp_path / "nowhere")
    real = os.rmdir

    def refuse(path: Path, **options: int) -> None:
        if Path(path).name == "step-00000003.deleted":
            raise PermissionError(13, "Permission denied", str(path))
        real(path, **options)

    monkeypatch.setattr(os, "rmdir", refuse)
    writer = checkpointer(tmp_path, keep_last=1)
    with caplog.at_level(logging.WARNING, logger="nanotrain"):
        for step in (2, 3, 4, 5):
            writer.save(
                step, {BOX: torch.full((64,), float(step))}, objects={}, config={}, topology={}
            )

    kept = ["step-00000002.deleted", "step-00000003.deleted", "step-00000005"]
    assert sorted(path.name for path in folder.iterdir()) == kept
    assert (folder / kept[0]).read_text() == "a file"
    assert (elsewhere / "manifest.json").exists(), "of a link only the link is removed"
    first, second = caplog.messages
    assert "step-00000003.deleted: Permission denied" in first
    assert "step-00000002.deleted: it is a file that nanotrain did not write" in second


def test_retention_reads_each_manifest_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    real = store.read_manifest
    monkeypatch.setattr(store, "read_manifest", lambda path: reads.append(path.name) or real(path))
    writer = checkpointer(tmp_path, keep_last=3)
    for step in range(1, 7):
        writer.save(step, {BOX: torch.full((64,), float(step))}, objects={}, config={}, topology={})
    assert reads == [f"step-{step:08d}" for step in range(1, 6)]

    truncate(tmp_path / "checkpoints" / "step-00000005")  # damage after that is still seen
    writer.save(7, {BOX: torch.full((64,), 7.0)}, objects={}, config={}, topology={})
    names = [path.name for path in store.complete_checkpoints(tmp_path / "checkpoints")]
    assert names == [f"step-{step:08d}" for step in (4, 6, 7)]


def test_multiples_of_the_retain_interval_are_kept_besides(tmp_path: Path) -> None:
    for step in range(1, 7):
        path = save(tmp_path, step)
    keep_newest(path.parent, 2, written=path, keep_every=3)
    names = [path.name for path in store.complete_checkpoints(path.parent)]
    assert names == [f"step-{step:08d}" for step in (3, 5, 6)]


def test_a_damaged_checkpoint_is_not_counted_among_those_to_keep(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    truncate(tmp_path / "checkpoints" / "step-00000003")

    save(tmp_path, 4, keep_last=2)

    assert [path.name for path in store.complete_checkpoints(tmp_path / "checkpoints")] == [
        "step-00000002",
        "step-00000004",
    ]
    assert (tmp_path / "checkpoints" / "step-00000003").is_dir()


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
            writer.save(
                step, {BOX: torch.full((64,), float(step))}, objects={}, config={}, topology={}
            )

    assert unfinished.is_dir()
    notes = {
        path.parent.name: path.read_text() for path in tmp_path.glob("checkpoints/*/notes.txt")
    }
    assert notes == {"step-00000001.deleted": "mine", "step-00000002.deleted": "mine"}
    assert not list(tmp_path.glob("checkpoints/*.deleted/*.safetensors")), (
        "what nanotrain wrote is gone"
    )
    assert (
        sum(
            "it holds notes.txt, which nanotrain did not write" in message
            for message in caplog.messages
        )
        == 2
    )
    assert len(caplog.messages) == 3, "one warning each"


@pytest.mark.parametrize("leftover", ["step-00000002.tmp", "step-00000002.replaced"])
def test_a_leftover_with_a_file_of_a_user_never_stops_a_save_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leftover: str
) -> None:
    monkeypatch.setattr(commit, "swap_names", lambda first, second: False)
    save(tmp_path, 2)
    folder = tmp_path / "checkpoints"
    (folder / leftover).mkdir()
    (folder / leftover / "notes.txt").write_text("mine")
    tensors = {BOX: torch.full((64,), 7.0)}
    saved = checkpointer(tmp_path).save(2, tensors, objects={}, config={}, topology={})
    assert value(tmp_path, saved) == 7.0
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-00000002",
        "step-00000002.deleted",
    ]
    assert (folder / "step-00000002.deleted" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("num_deleted", range(4))
def test_a_deletion_that_is_killed_leaves_no_manifest_without_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_deleted: int
) -> None:
    """A user who renames the folder back has a checkpoint or none, not a damaged one."""
    for step in (1, 2):
        save(tmp_path, step)
    folder = tmp_path / "checkpoints"
    real, deleted = Path.unlink, []

    def unlink(path: Path, **options: bool) -> None:
        if len(deleted) == num_deleted:
            raise KeyboardInterrupt
        deleted.append(path.name)
        real(path, **options)

    newest = folder / "step-00000002"
    monkeypatch.setattr(Path, "unlink", unlink)
    with suppress(KeyboardInterrupt):
        keep_newest(folder, 1, written=newest)
    left = {path.name for path in folder.glob("step-00000001*/*")}
    whole = {path.name for path in newest.iterdir()}
    assert "manifest.json" not in left or left == whole
    assert not (folder / "step-00000001").exists(), "its name is free from the start"
    assert {path.name for path in newest.iterdir()} == whole


@settings(deadline=None, max_examples=150)
@given(
    steps=st.sets(st.integers(1, 30), min_size=1, max_size=9),
    broken=st.sets(st.integers(1, 30), max_size=12),
    not_finite=st.sets(st.integers(1, 30), max_size=30),
    keep_last=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 6),
)
def test_what_is_deleted_follows_the_rules_whatever_is_there(
    steps: set[int],
    broken: set[int],
    not_finite: set[int],
    keep_last: int,
    keep_every: int | None,
) -> None:
    paths = {step: Path(f"step-{step:08d}") for step in sorted(steps)}
    written = paths[max(steps)]
    complete = [step for step in paths if step not in broken or paths[step] == written]
    with (
        patch.object(retention, "step_entries", lambda folder: list(paths.values())),
        patch.object(retention, "_is_complete", lambda path: int(path.name[5:]) not in broken),
        patch.object(retention, "not_finite", lambda path: int(path.name[5:]) in not_finite),
    ):
        deleted = surplus(Path(), keep_last, written=written, keep_every=keep_every)
    sound = [step for step in complete if step not in not_finite]
    counted = [step for step in complete if keep_every is None or step % keep_every]
    newest = [step for step in counted if paths[step] != written][::-1][: keep_last - 1]
    kept = {*newest, max(steps), *sound[-1:]} | {*complete} - {*counted}
    assert deleted == [paths[step] for step in complete if step not in kept]
