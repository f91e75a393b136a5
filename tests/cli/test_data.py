"""`nanotrain data`: the documents of a run from its folder alone."""

import json
from pathlib import Path

import pytest

from nanotrain.cli.main import main
from nanotrain.train.fit import fit
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.data_order import DataOrderHook
from nanotrain.train.hooks.log import LogHook
from tests.train.small_run import small_run

TEXTS = {
    "tales": ["Once upon a time there was a model."] * 9 + ["The frog sang all night."],
    "code": ["x = 1\n"] * 40,
}


def prepare(prefix: Path, texts: list[str]) -> None:
    rows = prefix.with_suffix(".jsonl")
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    line = [
        "prepare",
        "--input",
        str(rows),
        "--output",
        str(prefix),
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
    ]
    assert main([*line, "--overwrite"]) == 0


def train(folder: Path, *more: str) -> None:
    blend = ["3", str(folder / "tales"), "1", str(folder / "code")]
    line = [
        "--no-mock-data",
        "--train-data-path",
        *blend,
        "--global-batch-size",
        "4",
        "--train-iters",
        "8",
        *more,
    ]
    with small_run(folder / "run", *line) as run:
        fit(run, [LogHook(), DataOrderHook(), CheckpointHook()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, texts in TEXTS.items():
        prepare(folder / name, texts)
    train(folder, "--exit-interval", "4")
    return folder


def rows(capsys: pytest.CaptureFixture[str], *line: str) -> list[dict]:
    capsys.readouterr()
    assert main(["data", *line, "--json"]) == 0
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


def test_the_documents_of_a_step_are_listed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = rows(capsys, "step", str(folder / "run"), "2")
    assert sum(row["tokens"] for row in listed) == 4 * 16
    assert {row["step"] for row in listed} == {2} and {row["epoch"] for row in listed} == {0}
    # equal texts
    assert len({row["hash"] for row in listed if row["corpus"].endswith("code")}) == 1
    assert main(["data", "step", str(folder / "run"), "2"]) == 0
    assert capsys.readouterr().out.startswith("step  sample  corpus")
    assert main(["data", "step", str(folder / "run" / "checkpoints"), "2"]) == 2


def test_a_text_is_found_with_the_steps_that_read_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(capsys, "find", str(folder / "run"), "--text", "frog sang all")
    assert {(Path(row["corpus"]).name, row["document"]) for row in found} == {("tales", 9)}
    assert [row["state"] for row in found] == [
        "trained" if row["step"] <= 4 else "planned" for row in found
    ]
    assert found == rows(capsys, "find", str(folder / "run"), "--document", "tales:9")
    steps = {row["step"] for row in found}
    for number in range(1, 9):
        listed = rows(capsys, "step", str(folder / "run"), str(number))
        assert (number in steps) == any(
            row["document"] == 9 and row["corpus"].endswith("tales") for row in listed
        )
    assert steps
    assert main(["data", "find", str(folder / "run"), "--text", "no such words"]) == 2
    assert "no document has the text" in capsys.readouterr().err
    assert main(["data", "find", str(folder / "run"), "--text", "x"]) == 2
    assert "too short" in capsys.readouterr().err


def test_the_ledger_counts_tokens_by_corpus(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, total in (([], 4 * 4 * 16), (["--step", "6"], 6 * 4 * 16)):
        tokens = {
            Path(row["corpus"]).name: row["tokens"]
            for row in rows(capsys, "ledger", str(folder / "run"), *line)
        }
        assert tokens == {"tales": total * 3 // 4, "code": total // 4}


def test_a_corpus_that_changed_is_refused_at_a_resume(folder: Path) -> None:
    prepare(folder / "code", [*TEXTS["code"], "y = 2\n"])
    with pytest.raises(Exception, match="code is not the corpus that the run has read"):
        train(folder)
    prepare(folder / "code", TEXTS["code"])
    train(folder)
