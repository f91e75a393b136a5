"""The folder of an export: whole, or not there; nothing of a user is replaced."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from nanotrain.checkpoint.export_folder import export_folder
from nanotrain.errors import CheckpointError, EnvironmentFault

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("exists", [False, True])
def test_files_appear_when_the_block_succeeds(tmp_path: Path, exists: bool) -> None:
    output = tmp_path / "deep" / "out"
    if exists:
        output.mkdir(parents=True)
    with export_folder(output, nbytes=1) as folder:
        (folder / "a").write_text("1")
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text("2")
        assert not output.exists() or [path.name for path in output.iterdir()] == [folder.name]
    assert (output / "a").read_text() == "1" and (output / "sub/b").read_text() == "2"
    assert sorted(path.name for path in output.iterdir()) == ["a", "sub"]
    assert [path.name for path in output.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()], ids=str)
def test_after_an_error_all_is_as_before(
    tmp_path: Path, exists: bool, error: BaseException
) -> None:
    output = tmp_path / "out"
    if exists:
        output.mkdir()
    with pytest.raises(type(error)), export_folder(output, nbytes=1) as folder:
        (folder / "a").write_text("1")
        raise error
    assert output.exists() is exists and not list(tmp_path.rglob("a"))
    assert not [path for path in tmp_path.iterdir() if path != output]


def test_a_disk_without_space_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000, 1, 999))
    with export_folder(tmp_path / "fits", nbytes=999):
        pass
    with (
        pytest.raises(EnvironmentFault, match=r"1,000 bytes needed.*choose a new folder"),
        export_folder(tmp_path / "out", nbytes=1000),
    ):
        pytest.fail("the block runs")
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]


def test_two_exports_into_one_empty_folder_do_not_mix(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    with (
        pytest.raises(EnvironmentFault, match="File exists"),
        export_folder(output, nbytes=1) as folder,
    ):
        (folder / "a").write_text("second")
        (output / "a").write_text("first")  # by an export that ended meanwhile
    assert (output / "a").read_text() == "first" and os.listdir(output) == ["a"]


def test_a_dangling_link_is_no_free_name(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with (
        pytest.raises(CheckpointError, match="it is a file"),
        export_folder(tmp_path / "out", nbytes=1),
    ):
        pytest.fail("the block runs")
