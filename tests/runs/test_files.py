"""Files and folders of nanotrain: the user's umask, no links followed, nothing of others removed."""

import errno
import os
from pathlib import Path

import pytest

from nanotrain.errors import EnvironmentFault
from nanotrain.runs.files import (
    MARKER,
    FolderVanished,
    StorageFault,
    disk_fault,
    is_own,
    make_folder,
    open_append,
    remove_folder,
    swap_names,
    write_text,
)
from tests.runs.test_metrics_file import file_size_limit


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_files_have_the_mode_of_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "text", "a")
        open_append(tmp_path / "log").close()
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("text", "log")] == [mode, mode]


def test_a_link_is_replaced_by_a_new_file(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "text").symlink_to(tmp_path / "target")
    write_text(tmp_path / "text", "new")
    assert (tmp_path / "target").read_text() == "mine" and (tmp_path / "text").read_text() == "new"
    assert not (tmp_path / "text").is_symlink()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    write_text(tmp_path / "text", "old")
    with (
        file_size_limit(10),
        pytest.raises(EnvironmentFault, match=r"text cannot be written.*100 bytes needed"),
    ):
        write_text(tmp_path / "text", "x" * 100)
    assert (tmp_path / "text").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (
            errno.ENOSPC,
            "No space left on device: 7 bytes needed, .* bytes free in .*free space, or choose",
        ),
        (errno.EDQUOT, "quota.*7 bytes needed"),
        (errno.EROFS, "cannot be written: Read-only file system; choose another folder"),
    ],
)
def test_disk_errors_have_the_numbers(tmp_path, number, says):
    fault = disk_fault(OSError(number, os.strerror(number)), tmp_path / "file", needed=7)
    with pytest.raises(EnvironmentFault, match=f"(?i){says}"):
        raise fault


def test_a_vanished_folder_has_a_type_of_its_own(tmp_path):
    assert isinstance(
        disk_fault(OSError(errno.ENOENT, ""), tmp_path / "gone" / "file"), FolderVanished
    )


def test_own_folders_are_removed_and_those_of_others_refused(tmp_path):
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    make_folder(own, fix="")
    make_folder(own, fix="")  # again
    (own / "part").mkdir()
    (own / "part" / "file").touch()
    remove_folder(own)
    assert not own.exists()
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(
        EnvironmentFault,
        match=rf"foreign is not a folder of nanotrain.*{MARKER}.*; another --output",
    ):
        make_folder(foreign, fix="another --output")
    remove_folder(foreign)
    assert (foreign / "thesis.txt").exists() and not is_own(foreign)


def test_a_link_to_an_own_folder_is_not_own(tmp_path):
    make_folder(tmp_path / "own", fix="")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    assert not is_own(tmp_path / "link")
    with pytest.raises(EnvironmentFault, match="not a folder of nanotrain"):
        make_folder(tmp_path / "link", fix="")


def test_a_read_only_disk_is_the_error_and_not_what_cleans_up_behind_it(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(EnvironmentFault, match="a.json cannot be written: Read-only file system"):
        write_text(tmp_path / "a.json", "{}")


def test_folders_swap_their_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / f"was-{name}").mkdir(parents=True)
    if not swap_names(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot swap names")
    assert (tmp_path / "a" / "was-b").is_dir() and (tmp_path / "b" / "was-a").is_dir()


def test_a_missing_name_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError) as caught:
        swap_names(tmp_path / "a", tmp_path / "b")
    assert caught.value.errno == errno.ENOENT and (tmp_path / "a").is_dir()


def test_a_disk_without_inodes_is_not_said_to_have_space(tmp_path, monkeypatch):
    class Status:
        f_files, f_favail, f_bavail, f_frsize = 100, 0, 16_375, 4096

    monkeypatch.setattr(os, "statvfs", lambda _path: Status)
    text = str(
        disk_fault(OSError(errno.ENOSPC, "No space left on device"), tmp_path / "a", needed=8)
    )
    assert (
        f"8 bytes needed, no inode free in {tmp_path}, which has 100" in text
        and "bytes free" not in text
    )


def test_a_file_that_is_appended_to_is_no_link(tmp_path):
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(
        StorageFault, match="link is a symbolic link: files are not written through links"
    ):
        open_append(tmp_path / "link")
    assert not (tmp_path / "target").exists()
