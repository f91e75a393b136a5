"""What is taken of an input and what is left out is said in one line, with counts."""

import json
from pathlib import Path

import pytest

from nanotrain.errors import DataError
from nanotrain.prepare.chunks import plan_chunks, select_inputs
from nanotrain.prepare.readers import DocumentReader, lines_on_columns


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")
    return folder


def test_a_folder_names_all_that_it_leaves_out(tmp_path: Path) -> None:
    names = ("a.txt", "b.md", "s/c.TXT", ".git/x.txt", "s/.h", "d.py", "e.py", "f.html", "LICENSE")
    fill(tmp_path, *names, "a.txt.gz", "g.csv")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "gone.txt").symlink_to("nowhere")
    (selection,) = select_inputs([str(tmp_path)])
    assert selection.skipped == {
        "linked to no file": 1, "hidden": 2, "compressed beside the file itself": 1, "empty": 1,
    }  # fmt: skip
    assert selection.other_types == {".py": 2, ".html": 1, "no suffix": 1, ".csv": 1}
    line = selection.text()
    assert line.startswith(f"input {tmp_path}: 4 files (3 .txt, 1 .md); left out: ")
    assert "2 hidden" in line and "5 of other types (2 .py, " in line


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a.py", "b.py", "c.json"), "it has 2 .py, 1 .json; .*--text-suffix .py reads"),
        (("a.html",), "it has 1 .html; .*extract the text of the pages first"),
        ((".hidden.txt",), "it has 1 hidden"),
        ((), "it is empty"),
    ],
)
def test_a_folder_without_documents_is_refused_at_once(
    tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    fill(tmp_path, *names)
    with pytest.raises(DataError, match=f"holds no file of documents: {message}"):
        select_inputs([str(tmp_path)])


def test_further_types_are_text_where_they_are_asked_for(tmp_path: Path) -> None:
    fill(tmp_path, "a.py", "b.txt", "c.rs")
    chunks = plan_chunks([str(tmp_path)], subset=None, split="train", text_suffixes=[".py"])
    reader = DocumentReader("text")
    texts = [text for chunk in chunks for text in reader.read(chunk)]
    assert texts == ["text of a.py", "text of b.txt"]


def test_a_folder_of_rows_and_a_name_are_left_to_datasets(tmp_path: Path) -> None:
    fill(tmp_path, "a.csv", "b.csv")
    folder, name = select_inputs([str(tmp_path), "some/dataset"])
    assert folder.files is None and name.files is None
    assert name.text() == "input some/dataset: read by Hugging Face datasets"


def test_the_columns_that_are_read_are_said(tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    rows.write_text(json.dumps({"id": 1, "text": "a", "url": "u"}) + "\n")
    chunks = plan_chunks([str(rows)], subset=None, split="train")
    assert lines_on_columns(chunks, "text") == [
        f"{rows}: documents are read from text; not read: id, url"
    ]
    assert lines_on_columns(chunks, "text.en") == [
        f"{rows}: documents are read from text.en; not read: id, url"
    ]
    assert lines_on_columns(chunks, "body") == []  # an error when it is read


def test_every_file_is_taken_or_counted_below_a_folder_and_below_one_that_a_pattern_matches(
    tmp_path: Path,
) -> None:
    names = (
        "a.txt",
        "b.md",
        "s/c.txt",
        ".git/x.txt",
        "s/.h",
        "d.py",
        "e.py",
        "LICENSE",
        "a.txt.gz",
    )
    fill(tmp_path / "in", *names)
    (tmp_path / "in" / "empty.txt").touch()
    below, matched = select_inputs([str(tmp_path / "in"), str(tmp_path / "i*")])
    assert below.files == matched.files and len(below.files or ()) == 4
    assert below.skipped == matched.skipped
    assert below.other_types == matched.other_types
    left_out = sum(below.skipped.values()) - below.skipped["empty"]  # an empty file is taken
    assert 4 + left_out + sum(below.other_types.values()) == len(names) + 1
