"""Prepared files do not depend on workers or interruptions, and name their tokenizer."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from nanotrain.cli.prepare import prepare_parser
from nanotrain.data.corpus_info import CorpusInfo, read_info, recorded_tokenizer, write_info
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.tokenizer import ByteTokenizer, load_tokenizer
from nanotrain.errors import DataError, EnvironmentFault
from nanotrain.prepare import corpus as prepare
from nanotrain.prepare import parts
from nanotrain.prepare.options import PrepareOptions
from tests.runs.test_metrics_file import file_size_limit

TEXTS = [f"document {i} {'word ' * (i % 50)}" for i in range(400)]
# `nanotrain prepare` that is killed once two parts are there and its worker is at the next one.
DRIVER = """
import os, signal, sys
from nanotrain.cli.main import main
from nanotrain.prepare import chunks
from nanotrain.prepare.executors import EXECUTORS
chunks._MIN_BYTES = 2000
write_parts = EXECUTORS["local"]
def write_two_parts(*args, **options):
    for number, part in enumerate(write_parts(*args, **options)):
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield part
EXECUTORS["local"] = write_two_parts
if __name__ == "__main__":
    main(["prepare", *sys.argv[1:]])
"""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("nanotrain.prepare.chunks._MIN_BYTES", 2000)
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


def _prepare(source: Path, output: Path, *options: str) -> None:
    argv = ["--input", str(source), "--output", str(output), *options]
    argv += [] if "--tokenizer" in argv else ["--tokenizer", "bytes"]
    prepare.prepare_corpus(PrepareOptions.from_args(prepare_parser().parse_args(argv)))


def _bytes(prefix: Path) -> tuple[bytes, bytes]:
    return prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()


def test_documents_come_in_order_each_ended_by_eod(corpus: Path, tmp_path: Path) -> None:
    _prepare(corpus, tmp_path / "new folder" / "out", "--workers", "2")
    tokens = IndexedTokens(tmp_path / "new folder" / "out")
    tokenizer = ByteTokenizer()
    expected = [token for text in TEXTS for token in [*tokenizer.encode(text), tokenizer.eod]]
    assert tokens.dtype == np.uint16
    assert tokens.num_documents == len(TEXTS)
    assert tokens.read(0, tokens.num_tokens).tolist() == expected
    assert read_info(tokens.prefix).tokens == len(expected)
    assert recorded_tokenizer(tokens.prefix) == "bytes"
    assert not (tmp_path / "new folder" / "out.parts").exists()


def test_workers_streaming_and_dtype_change_no_token(corpus: Path, tmp_path: Path) -> None:
    _prepare(corpus, tmp_path / "a", "--workers", "1")
    _prepare(corpus, tmp_path / "b", "--workers", "3")
    _prepare(corpus, tmp_path / "c", "--workers", "2", "--streaming")
    _prepare(corpus, tmp_path / "d", "--workers", "1", "--dtype", "int32", "--no-append-eod")
    assert _bytes(tmp_path / "a") == _bytes(tmp_path / "b") == _bytes(tmp_path / "c")
    with pytest.raises(DataError, match="exists.*--overwrite"):
        _prepare(corpus, tmp_path / "c", "--streaming", "--max-documents", "5")
    wide = IndexedTokens(tmp_path / "d")
    assert wide.dtype == np.int32
    assert wide.num_tokens == sum(len(text) for text in TEXTS)


def test_a_trained_tokenizer_stays_beside_its_corpus(corpus: Path, tmp_path: Path) -> None:
    _prepare(corpus, tmp_path / "out", "--tokenizer", "bpe:280", "--workers", "1")
    tokenizer = load_tokenizer(recorded_tokenizer(tmp_path / "out") or "")
    tokens = IndexedTokens(tmp_path / "out")
    assert tokenizer.vocab_size == 280
    first = tokens.read(0, tokens.document_start(1))
    assert first[-1] == tokenizer.eod
    assert tokenizer.decode(first.tolist()) == TEXTS[0]


def test_a_lone_surrogate_does_not_stop_the_training_of_a_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": "some text \\ud800"}\n' * 20)
    _prepare(file, tmp_path / "out", "--tokenizer", "bpe:270", "--workers", "1")
    tokens = IndexedTokens(tmp_path / "out")
    tokenizer = load_tokenizer(recorded_tokenizer(tmp_path / "out") or "")
    assert tokenizer.decode(tokens.read(0, tokens.document_start(1)).tolist()) == "some text ?"


def test_killed_and_started_again_gives_the_bytes_of_a_run_undisturbed(
    corpus: Path, tmp_path: Path
) -> None:
    # given: a run killed once some parts are there
    _prepare(corpus, tmp_path / "undisturbed", "--tokenizer", "bpe:280", "--workers", "2")
    (tmp_path / "driver.py").write_text(DRIVER)
    options = [
        "--input",
        str(corpus),
        "--output",
        str(tmp_path / "again"),
        "--tokenizer",
        "bpe:280",
        "--workers",
        "1",
    ]
    command = [sys.executable, str(tmp_path / "driver.py"), *options]
    killed = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "again.parts").glob("*.idx")}
    # when
    written: list[Path] = []
    append = parts.TokenWriter.append_pair

    def note(self: parts.TokenWriter, prefix: Path) -> None:
        written.append(prefix.with_suffix(".idx"))
        assert kept.get(written[-1], 0) in (0, written[-1].stat().st_mtime_ns), (
            "a finished part was done again"
        )
        append(self, prefix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.TokenWriter, "append_pair", note)
        _prepare(corpus, tmp_path / "again", "--tokenizer", "bpe:280", "--workers", "2")
    # then
    assert 0 < len(kept) < len(written)
    assert _bytes(tmp_path / "again") == _bytes(tmp_path / "undisturbed")


def test_a_prepared_corpus_is_left_alone_or_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _prepare(corpus, tmp_path / "out", "--workers", "1")
    before = os.stat(tmp_path / "out.bin").st_mtime_ns
    _prepare(corpus, tmp_path / "out", "--workers", "2")
    assert "already prepared" in capsys.readouterr().out
    assert os.stat(tmp_path / "out.bin").st_mtime_ns == before
    with pytest.raises(DataError, match="exists.*--overwrite"):
        _prepare(corpus, tmp_path / "out", "--no-append-eod")
    _prepare(corpus, tmp_path / "out", "--no-append-eod", "--overwrite", "--workers", "1")
    assert IndexedTokens(tmp_path / "out").num_tokens == sum(len(text) for text in TEXTS)


@pytest.mark.parametrize(
    "options",
    [
        ["--no-append-eod"],
        ["--dtype", "int32"],
        ["--text-column", "id"],
        ["--tokenizer", "bpe:260"],
        ["--parse-special"],
    ],
)
def test_a_corpus_of_other_options_is_not_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "one two", "id": "three"}\n')
    _prepare(source, tmp_path / "out", "--workers", "1")
    with pytest.raises(DataError, match="exists.*--overwrite"):
        _prepare(source, tmp_path / "out", *options)
    assert "already prepared" not in capsys.readouterr().out


def test_a_corpus_of_a_changed_file_is_not_prepared(tmp_path: Path) -> None:
    """Another text of the same length, another file of the same text, one more file."""
    source, other = tmp_path / "in" / "a.txt", tmp_path / "b.txt"
    source.parent.mkdir()
    source.write_text("one two")
    other.write_text("one two")
    _prepare(source.parent, tmp_path / "out", "--workers", "1")
    status = os.stat(source)
    for name, text in (("a.txt", "two one"), ("a.txt", "one two three"), ("b.txt", "one")):
        (source.parent / name).write_text(text)
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        with pytest.raises(DataError, match="exists.*--overwrite"):
            _prepare(source.parent, tmp_path / "out")
        (source.parent / "b.txt").unlink(missing_ok=True)
        source.write_text("one two")
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match="exists.*--overwrite"):
        _prepare(other, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text-column", "body"], "no column body: its columns are text"),
        (["--tokenizer", "bpe:many"], "bpe:many has no size"),
        (["--dtype", "uint8"], "uint8 cannot hold the ids of a vocabulary of 257"),
        (["--max-documents", "5"], "no effect without --streaming"),
    ],
)
def test_bad_arguments_are_refused_and_leave_no_pair(
    corpus: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        _prepare(corpus, tmp_path / "out", "--workers", "1", *options)
    assert not (tmp_path / "out.bin").exists()
    assert not (tmp_path / "out.idx").exists()


def test_an_input_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="holds no text"):
        _prepare(tmp_path / "in.jsonl", tmp_path / "out", "--workers", "1")


def test_files_and_folders_of_others_are_neither_removed_nor_replaced(
    corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "out.parts").mkdir()
    (tmp_path / "out.parts" / "thesis.txt").write_text("years of work")
    with pytest.raises(
        EnvironmentFault, match="out.parts is not a folder of nanotrain.*choose another --output"
    ):
        _prepare(corpus, tmp_path / "out", "--workers", "1")
    assert (tmp_path / "out.parts" / "thesis.txt").read_text() == "years of work"
    for name in ("other.bin", "other.idx", "other.tokenizer"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(DataError, match=f"{name} exists and was not prepared by nanotrain"):
            _prepare(corpus, tmp_path / "other", "--workers", "1", "--overwrite")
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()


def test_a_full_disk_while_merging_is_one_error_and_the_parts_stay(
    corpus: Path, tmp_path: Path
) -> None:
    _prepare(corpus, tmp_path / "fits", "--workers", "1")
    with file_size_limit(20_000), pytest.raises(EnvironmentFault) as error:
        _prepare(corpus, tmp_path / "out", "--workers", "1")
    assert "out.bin cannot be written: File too large" in str(
        error.value
    ) and "bytes free in" in str(error.value)
    assert int(error.value.why.split(" bytes needed")[0].split()[-1].replace(",", "")) > 20_000
    assert {path.name for path in tmp_path.glob("out*")} == {"out.parts"}
    _prepare(corpus, tmp_path / "out", "--workers", "1")  # there is space again
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "fits")


@pytest.mark.parametrize("point", ["index", "info"])
def test_an_older_pair_never_stands_beside_the_plan_of_another(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    _prepare(corpus, tmp_path / "out", "--workers", "1")
    older = _bytes(tmp_path / "out")
    corpus.write_text('{"text": "other text"}\n')

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_and_fail(prefix: Path, info: CorpusInfo) -> None:
        write_info(prefix, info)
        fail()

    with monkeypatch.context() as patch:
        if point == "index":  # the tokens of the part are there, those of the merge too
            patch.setattr(
                prepare, "TokenWriter", FullWriter := type("FullWriter", (prepare.TokenWriter,), {})
            )
            patch.setattr(FullWriter, "_write_index", fail)
        else:
            patch.setattr(prepare, "write_info", write_and_fail)
        with pytest.raises(EnvironmentFault, match="No space left"):
            _prepare(corpus, tmp_path / "out", "--workers", "1", "--overwrite")
    assert (tmp_path / "out.idx").exists() == (point == "index"), (
        "the older corpus is whole until the info is new"
    )
    if point == "index":
        assert _bytes(tmp_path / "out") == older
    _prepare(corpus, tmp_path / "out", "--workers", "1", "--overwrite")
    _prepare(corpus, tmp_path / "new", "--workers", "1")
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "new") != older


def test_of_two_processes_that_prepare_one_corpus_the_second_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_inside, may_go_on, real = threading.Event(), threading.Event(), prepare.open_parts

    def wait_inside(*args: object) -> None:
        is_inside.set()
        may_go_on.wait()
        real(*args)

    monkeypatch.setattr(prepare, "open_parts", wait_inside)
    monkeypatch.setattr(prepare, "hold_lock", partial(prepare.hold_lock, wait_s=0.0))
    first = threading.Thread(target=_prepare, args=(corpus, tmp_path / "out", "--workers", "1"))
    first.start()
    try:
        assert is_inside.wait(300)
        with pytest.raises(EnvironmentFault) as error:
            _prepare(corpus, tmp_path / "out", "--workers", "1")
        assert (
            f"out is in use: process {os.getpid()} on" in str(error.value)
            and "--output" in error.value.fix
        )
    finally:
        may_go_on.set()
        first.join()
    assert read_info(tmp_path / "out").documents == len(TEXTS), "the first is not disturbed"
    assert not list(tmp_path.glob(".out*"))


def test_a_prepared_corpus_in_a_read_only_folder_is_prepared(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _prepare(corpus, tmp_path / "out", "--workers", "1")
    monkeypatch.setattr(prepare, "hold_lock", None)  # root may write to read-only folders
    _prepare(corpus, tmp_path / "out", "--workers", "1")
    assert "out is already prepared" in capsys.readouterr().out


def test_an_output_without_a_name_is_an_error(corpus: Path) -> None:
    for name in ("", ".", "/"):
        with pytest.raises(DataError, match="--output names no file"):
            _prepare(corpus, Path(name))
