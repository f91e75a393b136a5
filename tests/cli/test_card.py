"""`nanotrain card`: its arguments, its files, and what it refuses."""

import json
from pathlib import Path

import pytest

from nanotrain.cli.main import main


def test_a_family_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["card", "--family", "llama", "--only", "conversion", "--output", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["subject"] == "family llama" and values["holds"]
    assert [check["result"] for check in values["checks"]] == ["holds", *["not run"] * 5]
    page = (tmp_path / "out" / "llama.md").read_text()
    assert "| conversion | holds | `llama` written" in page
    assert json.loads((tmp_path / "out" / "llama.json").read_text()) == values


def test_the_card_of_a_recipe_file_lies_in_the_folder(tmp_path: Path) -> None:
    recipe = tmp_path / "my own.yaml"
    recipe.write_text("model: {num_layers: 2, vocab_size: 256}\n")
    words = [f"+config={recipe}", "--only", "conversion", "--output", str(tmp_path / "out")]
    assert main(["card", *words]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "my own.json",
        "my own.md",
    ]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--only", "speed"], "--only has speed; the checks are conversion"),
        (["--family", "nothing"], "nothing is not supported"),
        (["--family", "llama", "--num-layers", "2"], "takes no settings"),
        (["+config=nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_message(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["card", *words]) == 2
    assert named in capsys.readouterr().err


def test_a_file_in_place_of_the_folder_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("")
    words = ["--family", "llama", "--only", "conversion", "--output", str(tmp_path / "out")]
    assert main(["card", *words]) != 0
    assert "cannot write the card" in capsys.readouterr().err
