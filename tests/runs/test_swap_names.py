"""Two names swap what they name, in one operation."""

import errno
from pathlib import Path

import pytest

from nanotrain.runs.swap_names import swap_names


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
