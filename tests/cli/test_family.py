"""`nanotrain family add`: its arguments, what it prints, and what it refuses."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanotrain.cli.main import main
from nanotrain.interop.hf.families import FAMILIES
from nanotrain.interop.hf.folder_row import ROW_FILE
from tests.interop.hf.derive.folders import restored_tables, write_folder, write_own_code


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    with restored_tables():
        yield


def test_it_prints_the_row_the_check_and_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path, "helium")
    del FAMILIES["helium"]
    assert main(["family", "add", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "architecture: HeliumForCausalLM" in out
    assert "checked  beside transformers" in out and "the round trip is the identity" in out
    assert f"written  {tmp_path / ROW_FILE}" in out


def test_json_has_row_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_own_code(tmp_path / "mine")
    output = tmp_path / "rows.yaml"
    assert main(["family", "add", str(folder), "--output", str(output), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["model_type"] == "mine" and values["check"] is None
    assert values["files"] == [str(output)] and output.is_file()


@pytest.mark.parametrize(
    "words",
    [["add"], ["add", "nowhere"], ["remove"], ["add", ".", "--in-tree", "--output", "x"]],
)
def test_mistakes_are_one_message(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["family", *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")
