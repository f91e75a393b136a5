"""Addresses of commands: what a command that fails leaves, and other users' folders."""

import os
from pathlib import Path

import pytest

from nanotrain.cli.addresses import is_fetched, read_path, transfers, written_path
from nanotrain.errors import ConfigError, EnvironmentFault
from nanotrain.storage.remote import parse
from tests import s3_server


@pytest.fixture(scope="module")
def bucket() -> str:
    return s3_server.make_bucket("places")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    s3_server.without_pauses(monkeypatch)


def test_what_a_command_has_written_is_uploaded_in_its_order(bucket: str, tmp_path: Path) -> None:
    with transfers():
        folder = written_path(f"{bucket}/out")
        folder.mkdir()
        for number, name in enumerate(("z", "a", "manifest.json")):
            (folder / name).write_text(name)
            os.utime(folder / name, (number, number))
        with s3_server.server().counted() as requests:
            pass
    assert [request.path.rpartition("/")[2] for request in requests if request.method == "PUT"] == [
        "z",
        "a",
        "manifest.json",
    ]
    assert not any(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="out is not empty"):
        written_path(f"{bucket}/out")
    with pytest.raises(ConfigError, match="out is not empty"):
        written_path(f"{bucket}/out/", suffix="/a")


def test_a_command_that_fails_uploads_nothing_and_leaves_nothing(
    bucket: str, tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError), transfers():
        written_path(f"{bucket}/failed").write_text("half")
        raise ZeroDivisionError
    assert parse(f"{bucket}/failed").sizes() == {} and not any(tmp_path.iterdir())


def test_what_is_read_is_in_a_folder_of_this_user(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (parse(bucket) / "run/config.yaml").write(b"x")
    with transfers():
        path = read_path(f"{bucket}/run")
        assert (
            (path / "config.yaml").read_text() == "x"
            and is_fetched(path)
            and not is_fetched(tmp_path)
        )
        monkeypatch.setattr("os.getuid", lambda: 12345)
        (tmp_path / f"nanotrain-12345-{os.getpid()}").mkdir()
        with pytest.raises(EnvironmentFault, match="another user"):
            read_path(f"{bucket}/run")
