"""The files of a run folder that a start writes: after its first step, and none without a step."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from nanotrain.cli.main import main as nanotrain
from nanotrain.data.corpus_info import CorpusInfo, tokenizer_path, write_info
from nanotrain.inference.checkpoint import open_checkpoint
from nanotrain.prepare.token_writer import TokenWriter
from nanotrain.runs.failures import FOLDER
from nanotrain.train.main import main
from tests.train.small_run import SIZES, metrics_of

pytestmark = pytest.mark.usefixtures("logging_as_before")


def write_corpus(prefix: Path, *, words: list[str] | None = None) -> Path:
    """A corpus of bytes, or of a vocabulary of words."""
    with TokenWriter(prefix, np.dtype("uint16")) as writer:
        writer.add_documents([np.arange(first, first + 60) % 200 for first in range(30)])
    info = CorpusInfo("bytes", 257, 256)
    if words is not None:
        folder = tokenizer_path(prefix)
        folder.mkdir()
        vocabulary = {word: index for index, word in enumerate(words)}
        model = models.WordLevel(vocabulary, unk_token=words[0])
        Tokenizer(model).save(str(folder / "tokenizer.json"))
        info = CorpusInfo(folder.name, len(words))
    write_info(prefix, info)
    return prefix


def line(run: Path, corpus: Path, *more: str) -> list[str]:
    """The command line of a small run on a corpus, with all that is on by default."""
    fixed = ["--num-workers", "0", "--eval-iters", "1", "--split", "80,10,10"]
    paths = ["--run-dir", str(run), "--data-path", str(corpus)]
    return [*SIZES, *fixed, *paths, "--global-batch-size", "2", *more]


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of a folder but the notes on failed attempts."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.parent != folder / FOLDER:
            digests[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run of four steps that is done."""
    corpus = write_corpus(tmp_path / "corpus")
    assert main(line(tmp_path / "run", corpus, "--train-iters", "4", "--tensorboard")) == 0
    return tmp_path / "run"


@pytest.mark.parametrize(
    "changes",
    [
        ["--train-iters", "3"],
        ["--train-iters", "0"],
        ["--train-iters", "4", "--lr", "0.5", "--tensorboard", "--generate-tokens", "4"],
    ],
)
def test_a_start_that_trains_nothing_changes_no_file(finished, tmp_path, changes, capfd):
    before = hashes(finished)
    assert "tokenizer.json" in " ".join(before)
    assert main(line(finished, tmp_path / "corpus", *changes)) == 0
    assert hashes(finished) == before
    assert "nothing" in capfd.readouterr().err


def test_a_start_that_fails_before_its_first_step_is_done_leaves_a_note_only(
    finished, tmp_path, monkeypatch
):
    before = hashes(finished)
    more = ["--train-iters", "9", "--lr", "0.5", "--tensorboard"]

    def out_of_memory(*_, **__):
        raise MemoryError("no memory")

    monkeypatch.setattr("nanotrain.train.fit.train_step_with_repeats", out_of_memory)
    assert main(line(finished, tmp_path / "corpus", *more)) == 2
    assert hashes(finished) == before
    assert len(list((finished / FOLDER).iterdir())) == 1


@pytest.mark.parametrize("iters", ["3", "9"])
def test_another_tokenizer_is_an_error_in_the_own_folder(finished, tmp_path, iters, capfd):
    other = write_corpus(tmp_path / "other", words=["a", "b", "c"])
    before = hashes(finished)
    assert main(line(finished, other, "--train-iters", iters)) == 2
    error = capfd.readouterr().err
    assert f"the data has another tokenizer than the run in {finished}" in error
    assert (
        f"one id stands for different texts in {tokenizer_path(other)} and {finished / 'tokenizer'}"
        in error
    )
    assert hashes(finished) == before
    # a new run in the folder has its own
    assert main(line(finished, other, "--train-iters", "1", "--no-auto-resume")) == 0
    assert '"a"' in (finished / "tokenizer" / "tokenizer.json").read_text()


def test_a_tokenizer_that_is_not_the_one_of_the_weights_is_named(finished, tmp_path, capfd):
    stored = finished / "tokenizer" / "tokenizer.json"
    recorded = open_checkpoint(finished).manifest.objects["tokenizer_sha256"]
    assert recorded == hashlib.sha256(stored.read_bytes()).hexdigest()
    other = write_corpus(tmp_path / "other", words=["a", "b", "c"])
    (stored).write_bytes((tokenizer_path(other) / "tokenizer.json").read_bytes())
    text = tmp_path / "text.txt"
    text.write_text("some text to read " * 20)
    commands = [
        ["generate", str(finished), "--prompt", "a"],
        ["evaluate", str(finished), "--data", str(text)],
        ["checkpoint", "export-hf", str(finished), str(tmp_path / "exported")],
    ]
    for command in commands:
        assert nanotrain(command) == 2, command
        error = capfd.readouterr().err
        assert f"{finished / 'tokenizer'} is not the tokenizer that" in error, command
    assert nanotrain(["generate", str(finished), "--prompt", "a", "--tokenizer", "bytes"]) == 0


def test_a_started_run_is_described_after_its_first_step(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    assert main(line(tmp_path / "run", corpus, "--train-iters", "2")) == 0
    assert main(line(tmp_path / "run", corpus, "--train-iters", "3", "--lr", "0.5")) == 0
    rows = [json.loads(row) for row in (tmp_path / "run" / "starts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2] and "optim.lr" in rows[1]["changed"]
    assert "lr: 0.5" in (tmp_path / "run" / "config.yaml").read_text()
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2, 3]
