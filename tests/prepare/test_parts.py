"""Part files: kept for the same plan, deleted for another, and written by workers whose end is an
error.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nanotrain.data.indexed import IndexedTokens
from nanotrain.errors import DataError, EnvironmentFault
from nanotrain.prepare.chunks import InputChunk
from nanotrain.prepare.options import PrepareOptions
from nanotrain.prepare.parts import (
    PartJob,
    PartWriter,
    is_complete,
    open_parts,
    part_prefix,
    read_counts,
    write_parts,
)
from nanotrain.prepare.text_counts import TextCounts
from nanotrain.runs import files
from tests.runs.test_metrics_file import file_size_limit


def _job(output: Path) -> PartJob:
    """A job whose parts are in `output`.parts; the folder is there."""
    options = PrepareOptions(("a",), output, "bytes")
    options.parts.mkdir(exist_ok=True)
    return PartJob(options, tokenizer="bytes", dtype="uint16")


def test_parts_of_another_plan_are_deleted(tmp_path: Path) -> None:
    open_parts(tmp_path / "p.parts", {"inputs": 1})
    chunk = InputChunk("texts", texts=("ab", "\ud800"))
    PartWriter(_job(tmp_path / "p")).write(0, chunk)
    open_parts(tmp_path / "p.parts", {"inputs": 1})
    assert is_complete(tmp_path / "p.parts", 0)
    index, kept = tmp_path / "p.parts" / "000000.idx", tmp_path / "kept"
    index.rename(kept)
    assert not is_complete(tmp_path / "p.parts", 0), (
        "tokens without their index are those of a killed writer"
    )
    kept.rename(index)
    open_parts(tmp_path / "p.parts", {"inputs": 2})
    assert not is_complete(tmp_path / "p.parts", 0)


def test_parts_keep_what_was_counted_in_their_documents(tmp_path: Path) -> None:
    writer = PartWriter(_job(tmp_path / "p"))
    writer.write(0, InputChunk("texts", texts=("ab", "", "\ud800")))
    writer.write(1, InputChunk("texts", texts=("", "a")))
    assert read_counts(tmp_path / "p.parts", 2) == TextCounts(empty=2, surrogates=1)


@pytest.mark.parametrize("workers", [1, 3])
def test_every_chunk_becomes_its_part(tmp_path: Path, workers: int) -> None:
    chunks = [
        (number, InputChunk("texts", texts=("a" * number, "b"), num_bytes=number))
        for number in range(7)
    ]
    assert sorted(write_parts(_job(tmp_path / "p"), chunks, workers=workers)) == list(range(7))
    for number in range(7):
        corpus = IndexedTokens(part_prefix(tmp_path / "p.parts", number))
        assert corpus.num_documents == (2 if number else 1)
        assert corpus.num_tokens == number + (3 if number else 2)


def test_an_error_of_a_worker_arrives_as_it_was_raised(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    chunk = InputChunk("text", (str(tmp_path / "bad.txt"),))
    with pytest.raises(DataError) as caught:
        list(write_parts(_job(tmp_path / "p"), [(0, chunk)], workers=2))
    assert (
        str(caught.value)
        == f"{tmp_path / 'bad.txt'} is not UTF-8: byte 2 is 0xff; convert or remove it"
    )
    assert caught.value.__cause__ is None, "no traceback of the worker"


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    job = PartJob(
        PrepareOptions(("a",), tmp_path / "missing", "bytes"), tokenizer="bytes", dtype="uint16"
    )
    with pytest.raises(EnvironmentFault, match=r"missing\.parts does not exist any more"):
        list(write_parts(job, [(0, InputChunk("texts", texts=("a",)))], workers=1))


def test_a_part_that_does_not_fit_is_an_error_with_its_bytes(tmp_path: Path) -> None:
    """Raised while the part still takes its space: the free bytes are those that were too few."""
    writer, chunk = PartWriter(_job(tmp_path / "p")), InputChunk("texts", texts=("abcd" * 100,))
    larger = InputChunk("texts", texts=("abcd" * 5000,))
    # with its index, and before all is encoded
    for full, needed in ((chunk, 822), (larger, 40002)):
        taken: list[str] = []

        def no_space(path: Path, names: list[str] = taken) -> str:
            names += os.listdir(path.parent)
            return "none free"

        with file_size_limit(500), pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "free_space", no_space)
            with pytest.raises(
                EnvironmentFault, match=f"000000.bin cannot .* {needed:,} bytes needed, none free"
            ):
                writer.write(0, full)
        assert taken and not list((tmp_path / "p.parts").iterdir())
    writer.write(0, chunk)
    assert IndexedTokens(part_prefix(tmp_path / "p.parts", 0)).num_tokens == 401


def test_a_killed_worker_is_one_clear_error(tmp_path: Path) -> None:
    def chunks() -> Iterator[tuple[int, InputChunk]]:
        yield 0, InputChunk("texts", texts=("a",))
        for number in range(1, 500):
            if number == 3:
                for process in _workers():
                    os.kill(process, signal.SIGKILL)
            yield number, InputChunk("texts", texts=("a" * 1000,))

    with pytest.raises(
        EnvironmentFault, match="tokenizing process died: SIGKILL ended it.*fewer --workers"
    ):
        list(write_parts(_job(tmp_path / "p"), chunks(), workers=1))


def _workers() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


@pytest.mark.parametrize("ids", [[], [5], [5, 9], [9, 5], [9], [5, 9, 9]])
def test_a_conversation_has_one_end_of_document_more_unless_it_ends_with_it(ids: list[int]) -> None:
    mask = np.arange(len(ids), 0, -1, dtype=np.uint8) % 2  # the last token is a target
    for given in (mask, 1 - mask):
        chat = SimpleNamespace(encode=lambda text, given=given: (list(ids), given))
        writer: Any = SimpleNamespace(chat=chat, _eod=[9], _num_targets=0)
        documents, masks = PartWriter._encode(writer, ["a", "b"])
        end = [9] * (ids[-1:] != [9])
        assert documents == [ids + end] * 2
        expected = given.tolist() + (given[-1:].tolist() or [0]) * len(end)
        assert [each.tolist() for each in masks] == [expected] * 2
        assert writer._num_targets == 2 * sum(expected)
