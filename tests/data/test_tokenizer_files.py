"""The files of a tokenizer: of bounded size, none of another folder, settings that are checked."""

from pathlib import Path

import pytest

from nanotrain.data.tokenizer_files import SETTINGS, TOKENIZER_FILES, read_files, read_settings
from nanotrain.errors import DataError


def test_every_file_of_the_folder_is_read(tmp_path: Path) -> None:
    for name in (*TOKENIZER_FILES, "model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert set(read_files(tmp_path)) == set(TOKENIZER_FILES)
    assert read_files(tmp_path / "none") == {}


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_a_pipe_is_no_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(DataError, match=f"{name} cannot be read: it is"):
        read_files(tmp_path)


def test_settings_are_an_object_with_texts() -> None:
    assert read_settings({SETTINGS: b'{"eos_token": {"content": "x"}}'}, Path("f"))
    for content in (b"[]", b'{"eos_token": 3}', b"{"):
        with pytest.raises(DataError, match="f cannot be read: .*correct or remove it"):
            read_settings({SETTINGS: content}, Path("f"))
