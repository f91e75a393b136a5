"""A row beside config.json: it adds a model_type, and a hostile one is one error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import FAMILIES, add_folder_family, known_rows
from nanotrain.interop.hf.folder_row import (
    MAX_ROW_BYTES,
    ROW_FILE,
    require_readable,
    write_row,
)
from tests.interop.hf.derive.folders import restored_tables

ROW: dict[str, Any] = {
    "architecture": "MineForCausalLM",
    "from": ["llama_layout"],
    "parts": ["rope"],
    "layers": {"mlp.up": "mlp.w3", "mlp.down": {"name": "mlp.w2", "transposed": True}},
}


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    with restored_tables():
        yield


def add(folder: Path, text: str) -> None:
    (folder / ROW_FILE).write_text(text)
    add_folder_family(folder)


def test_a_row_adds_its_family(tmp_path: Path) -> None:
    add(tmp_path, write_row("mine", ROW))
    assert FAMILIES["mine"].layers["mlp.up"].name == "mlp.w3"
    add_folder_family(tmp_path)  # again


def test_a_row_of_a_known_family_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = FAMILIES["llama"]
    add(tmp_path, write_row("llama", ROW))
    assert FAMILIES["llama"] is before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"from": ["mine"]}, "'mine', which nanotrain does not know"),
        ({"parts": ["os.system"]}, "which nanotrain does not know"),
        ({"layer": "model.{layer:>99999999999}"}, "it must be a name with"),
        ({"layer": "model.{layer.__class__}"}, "it must be a name with"),
        ({"entries": {"x": "no.key"}}, "is no setting of the model section"),
        ({"fixed": {"no.key": 1}}, "is no setting of the model section"),
        ({"fixed": {"num_layers": "many"}}, "is no row of a family"),
        ({"layers": {"mlp.up": {"name": "w", "groups": "__class__"}}}, "'groups'"),
        ({"layers": {"mlp.up": {"name": "w", "groups": 10**9}}}, "at most 1024"),
        ({"layers": {"mlp.up": {"name": "w", "interleaved": [0, 0]}}}, "'interleaved'"),
        ({"layers": {"mlp.up": ["w"]}}, "it must be text"),
        ({"ignored": ["*" * 500]}, "which is no pattern of names"),
        ({"zero_experts": ["x"]}, "'zero_experts' is no table"),
        ({"required": {"x": 1}}, "must be a list"),
        ({"passed_over": ["x"] * 1000}, "at most 256"),
        ({"constants": {"x": "y"}}, "must be a number"),
        ({"without_class": "yes"}, "must be true or false"),
        ({"architecture": "a b"}, "it must be a name"),
        ({"from": [["a"]]}, "from is a list of 1 items, it must be text"),
        ({"parts": [{"a": 1}]}, "parts is an object, it must be text"),
        ({"defaults": {1: 2}}, "defaults is 1, it must be text"),
        ({"written": {"a b": 2}}, "written is 'a b', it must be a name"),
    ],
)
def test_a_hostile_row_is_one_error(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match="is no row of a family") as caught:
        add(tmp_path, write_row("mine", ROW | change))
    assert named in str(caught.value)
    assert "mine" not in FAMILIES


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        "families: {}",
        "families: {a: {}, b: {}}",
        "families: {mine: 3}",
        "a: &a [1]\nfamilies: *a",
        "families: !!python/object/apply:os.abort []",
        "#" * (MAX_ROW_BYTES + 1),
        "families: " + "[" * 5000,
        "families: {mine: !!bool maybe}",
        'families: {mine: !!int ""}',
    ],
)
def test_a_file_that_is_no_row_is_one_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(HuggingFaceError, match="is no row of a family"):
        add(tmp_path, text)


def test_bytes_that_are_no_text_are_one_error(tmp_path: Path) -> None:
    (tmp_path / ROW_FILE).write_bytes(b"families: \xff")
    with pytest.raises(HuggingFaceError, match="is no row of a family"):
        add_folder_family(tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("my model", {}, "model_type is 'my model', it must be a name"),
        ("mine", {"defaults": {"x": ...}}, "cannot represent an object"),
        ("mine", {"passed_over": ["a b"]}, "'a b', which is no pattern of names"),
        ("mine", {"defaults": {"x": "y" * MAX_ROW_BYTES}}, "more than 65,536 bytes"),
    ],
)
def test_a_row_that_would_not_read_back_is_refused(
    kind: str, change: dict[str, Any], named: str
) -> None:
    require_readable("mine", ROW, known=known_rows())
    with pytest.raises(HuggingFaceError, match="cannot be in a file") as caught:
        require_readable(kind, ROW | change, known=known_rows())
    assert named in str(caught.value)


def test_a_row_behind_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "row").write_text(write_row("mine", ROW))
    (tmp_path / "folder" / ROW_FILE).symlink_to(tmp_path / "row")
    with pytest.raises(HuggingFaceError, match="symbolic link"):
        add_folder_family(tmp_path / "folder")


def test_a_written_row_reads_back() -> None:
    text = write_row("mine", ROW, comments=["one", "two"])
    assert text.startswith("# one\n# two\nfamilies:\n")
    assert yaml.safe_load(text) == {"families": {"mine": ROW}}
