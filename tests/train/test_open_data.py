"""A resume with other data: every corpus goes on where it stopped, or the start asks for a flag."""

import json
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from nanotrain.cli.main import main as nanotrain
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.corpus_info import CorpusInfo, write_info
from nanotrain.data.order import DataOrder
from nanotrain.prepare.token_writer import TokenWriter
from nanotrain.train.main import main
from tests.train.small_run import SIZES, small_run

pytestmark = pytest.mark.usefixtures("logging_as_before")
STEPS = 6  # before the change
BATCH = 4


def write_corpus(prefix: Path, *, first: int = 0) -> str:
    """20 documents of 61 tokens of bytes: 76 samples of 16 tokens."""
    with TokenWriter(prefix, np.dtype("uint16")) as writer:
        for number in range(20):
            start = first + 7 * number
            writer.add_documents([np.arange(start, start + 61) % 251])
    write_info(prefix, CorpusInfo("bytes", 257, 256))
    return str(prefix)


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, str]:
    """Prefixes of three corpora of different content."""
    starts = {"a": 0, "b": 50, "c": 100}
    return {name: write_corpus(tmp_path / name, first=first) for name, first in starts.items()}


def train(folder: Path, *more: str, iters: int = STEPS) -> int:
    """Train up to a step; returns the exit code."""
    fixed = ["--num-workers", "0", "--eval-interval", "0", "--split", "1,0,0", "--no-report"]
    fixed += ["--manual-gc-interval", "0"]  # collections of a whole suite's objects are slow
    size = ["--global-batch-size", str(BATCH), "--micro-batch-size", str(BATCH)]
    line = [*SIZES, *fixed, *size, "--run-dir", str(folder), "--train-iters", str(iters), *more]
    return main(line)


def indices(folder: Path, steps: range) -> dict[str, list[int]]:
    """The samples of every corpus that steps read, from data-order.jsonl."""
    read: dict[str, list[int]] = defaultdict(list)
    for start, known in DataOrder.read(folder).ranges(steps[-1]):
        for step in known:
            if step in steps:
                for sample in start.samples(step):
                    source, index = start._locate(sample)
                    read[start.corpora[source].corpus.prefix.name].append(index)
    return read


def parts_read(folder: Path, steps: range, capfd) -> list[tuple[str, int, int]]:
    """Corpus, epoch and first byte of what `nanotrain data step` lists."""
    parts = []
    for step in steps:
        capfd.readouterr()
        assert nanotrain(["data", "step", str(folder), str(step), "--json"]) == 0
        for line in capfd.readouterr().out.splitlines():
            row = json.loads(line)
            parts.append((Path(row["corpus"]).name, row["epoch"], row["first_byte"]))
    return parts


def blend(*entries: object) -> list[str]:
    return ["--data-path", *map(str, entries)]


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ("0.9 a 0.1 b", {"a": 12 + 14, "b": 12 + 2}),
        ("0.5 b 0.5 a", {"a": 20, "b": 20}),
        ("0.25 a 0.25 b 0.5 c", {"a": 16, "b": 16, "c": 8}),
        ("b", {"a": 12, "b": 28}),
    ],
)
def test_every_corpus_goes_on_where_it_stopped(tmp_path, corpora, words, counts, capfd):
    run = tmp_path / "run"
    assert train(run, *blend("0.5", corpora["a"], "0.5", corpora["b"])) == 0
    before = indices(run, range(1, STEPS + 1))
    assert before == {"a": [*range(12)], "b": [*range(12)]} or {
        name: sorted(read) for name, read in before.items()
    } == {"a": [*range(12)], "b": [*range(12)]}
    changed = blend(*(corpora.get(word, word) for word in words.split()))
    assert train(run, *changed, iters=8) == 0
    error = capfd.readouterr().err
    if "a" in words.split():
        assert f"{corpora['a']} goes on at sample 12 of 76 samples of its epoch 1" in error
    else:
        assert f"{corpora['a']} is not read any more: 12 samples were read, the other 64" in error
    if "c" in words.split():
        assert f"{corpora['c']} is new and starts at its beginning, of 76 samples" in error
    # a later start with the same data goes on as if nothing had happened
    assert train(run, *changed, iters=10) == 0
    assert "goes on" not in capfd.readouterr().err
    read = indices(run, range(1, 11))
    assert {name: sorted(found) for name, found in read.items()} == {
        name: [*range(count)] for name, count in counts.items()
    }
    parts = parts_read(run, range(1, 11), capfd)
    assert len(set(parts)) == len(parts), "nothing is read twice"


def test_what_is_trained_is_what_the_order_says(tmp_path, corpora):
    first = blend("0.5", corpora["a"], "0.5", corpora["b"])
    assert train(tmp_path / "run", *first) == 0
    changed = [*blend("0.75", corpora["c"], "0.25", corpora["b"]), "--no-mock-data"]
    more = ["--global-batch-size", str(BATCH), "--split", "1,0,0", "--train-iters", "9"]
    assert train(tmp_path / "run", *changed, iters=7) == 0
    with small_run(tmp_path / "run", *changed, *more) as run:
        dataset = run.batches.dataset
        assert isinstance(dataset, BlendedDataset) and run.state.step == 7
        start = DataOrder.read(tmp_path / "run").starts[-1]
        for sample in range(24, 60):
            assert dataset.locate(sample) == start._locate(sample)
            source, index = dataset.locate(sample)
            expected = dataset.datasets[source][index]
            np.testing.assert_array_equal(dataset[sample].tokens, expected.tokens)


def test_a_renamed_corpus_goes_on(tmp_path, corpora, capfd):
    run = tmp_path / "run"
    assert train(run, *blend("0.5", corpora["a"], "0.5", corpora["b"])) == 0
    for path in tmp_path.glob("a.*"):
        shutil.move(path, tmp_path / f"moved{path.name[1:]}")
    moved = str(tmp_path / "moved")
    assert train(run, *blend("0.5", moved, "0.5", corpora["b"]), iters=10) == 0
    assert f"{moved} (before {corpora['a']}) goes on at sample 12" in capfd.readouterr().err
    read = indices(run, range(1, 11))
    assert {name: sorted(found) for name, found in read.items()} == {
        "moved": [*range(20)],
        "b": [*range(20)],
    }
    parts = parts_read(run, range(1, 11), capfd)
    assert len(set(parts)) == len(parts)


def test_another_corpus_of_the_same_name_is_refused(tmp_path, corpora, capfd):
    run = tmp_path / "run"
    assert train(run, *blend("0.5", corpora["a"], "0.5", corpora["b"])) == 0
    write_corpus(tmp_path / "a", first=33)
    for words in (("0.5", "a", "0.5", "b"), ("0.9", "a", "0.1", "b")):
        paths = blend(*(corpora.get(word, word) for word in words))
        assert train(run, *paths, iters=10) == 2
        assert f"{corpora['a']} is not the corpus that the run has read" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        (["--seed", "7"], "seed 1234 -> 7"),
        (["--seq-length", "32"], "seq_length 16 -> 32"),
        (["--split", "90,10,0"], "split 1,0,0 -> 90,10,0"),
        (["--no-shuffle"], "shuffle True -> False"),
    ],
)
def test_another_order_within_an_epoch_needs_the_flag(tmp_path, corpora, flags, change, capfd):
    run = tmp_path / "run"
    longer = ["--max-position-embeddings", "32"]
    assert train(run, *blend(corpora["a"]), *longer) == 0
    before = parts_read(run, range(1, STEPS + 1), capfd)
    assert train(run, *blend(corpora["a"]), *longer, *flags, iters=10) == 2
    error = capfd.readouterr().err
    assert f"the data changed ({change}) and cannot go on exactly after 24 samples" in error
    assert "tokens of this epoch are read again and" in error
    assert "accept it with --allow-data-changes" in error and "Traceback" not in error
    assert parts_read(run, range(1, STEPS + 1), capfd) == before
    allowed = [*flags, "--allow-data-changes"]
    assert train(run, *blend(corpora["a"]), *longer, *allowed, iters=25) == 0
    error = capfd.readouterr().err
    assert "are read again and" in error
    # the numbers are those of the tokens that the order lists, up to the end of the epoch
    count = int(error.split("in another order: ")[1].split(" tokens")[0].replace(",", ""))
    assert count == repeated_tokens(run)


def repeated_tokens(run: Path) -> int:
    """Tokens of epoch 1 that the steps after the change read again."""
    tokens: list[set[int]] = [set(), set()]
    for start, steps in DataOrder.read(run).ranges(60):
        number = 0 if start.step < STEPS else 1
        for step in steps:
            for use in start.documents(step):
                if use.epoch == 0:
                    tokens[number] |= set(range(use.first_byte // 2, use.last_byte // 2))
    return len(tokens[0] & tokens[1])


def test_a_sequence_length_in_file_order_goes_on_at_the_same_token(tmp_path, corpora, capfd):
    run = tmp_path / "run"
    ordered = [*blend(corpora["a"]), "--no-shuffle", "--max-position-embeddings", "32"]
    assert train(run, *ordered) == 0
    assert train(run, *ordered, "--seq-length", "32", iters=8) == 0
    assert "goes on at sample 12 of 38 samples of its epoch 1, where it" in capfd.readouterr().err
    first = min(byte for _, _, byte in parts_read(run, range(STEPS + 1, STEPS + 2), capfd))
    assert first == 2 * 16 * BATCH * STEPS, "the token after the last one, of two bytes"


def test_training_data_becomes_validation_data_with_the_flag_alone(tmp_path, corpora, capfd):
    run = tmp_path / "run"
    validated = [*blend(corpora["a"]), "--eval-interval", "100", "--eval-iters", "1"]
    assert train(run, *validated, "--split", "100,0,0", "--eval-interval", "0") == 0
    halves = [*validated, "--split", "50,50,0"]
    assert train(run, *halves, iters=8) == 2
    error = capfd.readouterr().err
    assert f"610 tokens of {corpora['a']} were training data and become validation data" in error
    assert train(run, *halves, "--allow-data-changes", iters=8) == 0
    capfd.readouterr()
    # back again: what was validated is trained on, which is logged
    whole = [*validated, "--split", "90,10,0", "--allow-data-changes"]
    assert train(run, *whole, iters=9) == 0
    assert f"488 tokens of {corpora['a']} were validation data and become training data" in (
        capfd.readouterr().err
    )


def test_a_corpus_between_two_epochs_goes_on_in_any_order(tmp_path, corpora, capfd):
    run = tmp_path / "run"
    assert train(run, *blend(corpora["a"]), iters=19) == 0  # 76 samples
    assert train(run, *blend(corpora["a"]), "--seed", "7", iters=20) == 0
    assert "goes on at sample 0 of 76 samples of its epoch 2, where it" in capfd.readouterr().err


def test_another_batch_size_goes_on_at_the_next_sample(tmp_path, corpora, capfd):
    run = tmp_path / "run"
    paths = blend("0.5", corpora["a"], "0.5", corpora["b"])
    assert train(run, *paths) == 0
    assert train(run, *paths, "--global-batch-size", "8", iters=8) == 0
    assert "the data goes on at sample 24, where step-00000006 stopped" in capfd.readouterr().err
    read = indices(run, range(1, 9))
    assert {name: sorted(found) for name, found in read.items()} == {
        "a": [*range(20)],
        "b": [*range(20)],
    }


def test_a_mix_ends_where_the_data_changes(tmp_path, corpora, capfd):
    run = tmp_path / "run"
    first = blend("0.5", corpora["a"], "0.5", corpora["b"])
    mix = ["data", "mix", str(run), "--weights", "1", "b"]
    assert train(run, *first, iters=2) == 0
    assert train(run, *first, "--exit-interval", "3", iters=9) == 0
    assert nanotrain(mix) == 0
    assert train(run, *first, "--exit-interval", "6", iters=9) == 0
    read = indices(run, range(1, 7))
    assert max(read["a"]) + 1 == 8 and max(read["b"]) + 1 == 16
    assert train(run, *blend("1", corpora["a"], "1", corpora["c"]), iters=9) == 0
    assert train(run, *blend("1", corpora["a"], "1", corpora["c"]), iters=11) == 0
    read = indices(run, range(1, 12))
    assert {name: sorted(found) for name, found in read.items()} == {
        "a": [*range(18)],
        "b": [*range(16)],
        "c": [*range(10)],
    }
    assert nanotrain(mix) == 2 and not (run / "data-mix.request").exists()
    assert "step 11 of 11 is done" in capfd.readouterr().err
    assert nanotrain(["data", "step", str(run), "100000"]) == 2
    assert "step 100,000 is not in the run: its last step is 11" in capfd.readouterr().err


def test_a_checkpoint_without_a_record_is_counted_from_its_corpora(
    tmp_path, corpora, monkeypatch, capfd
):
    monkeypatch.setattr("nanotrain.train.open_data.read_record", lambda objects: None)
    run = tmp_path / "run"
    assert train(run, *blend("0.5", corpora["a"], "0.5", corpora["b"])) == 0
    changed = blend("0.9", corpora["a"], "0.1", corpora["c"])
    assert train(run, *changed, iters=7) == 0
    assert f"{corpora['a']} goes on at sample 12 of 76" in capfd.readouterr().err
    for path in tmp_path.glob("c.*"):
        path.unlink()
    assert train(run, *blend(corpora["a"]), iters=8) == 2
    error = capfd.readouterr().err
    assert "the data changed, and that of step-00000007 cannot be opened" in error
    assert train(run, *blend(corpora["a"]), "--allow-data-changes", iters=8) == 0
    assert "what was read of each corpus is unknown" in capfd.readouterr().err
