"""Token files read back what was written, in stream offsets, and damaged ones are refused with a
reason.
"""

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanotrain.data import indexed, remote
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.token_format import DTYPES, IndexHeader
from nanotrain.errors import DataError
from tests.data.conftest import WriteCorpus, random_documents

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)
INTEGERS = [dtype.name for dtype in DTYPES.values() if dtype.kind != "f"]
SAME_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)


def _write_pair(
    prefix: Path,
    tokens: np.ndarray,
    *,
    lengths: Sequence[int],
    pointers: Sequence[int],
    documents: Sequence[int] | None = None,
) -> Path:
    """Write a pair with these columns; one document per sequence by default."""
    prefix.with_suffix(".bin").write_bytes(tokens.astype("<u2").tobytes())
    documents = range(len(lengths) + 1) if documents is None else documents
    header = IndexHeader(np.dtype("<u2"), len(lengths), len(documents)).pack()
    columns = (
        np.asarray(lengths, "<i4"),
        np.asarray(pointers, "<i8"),
        np.asarray(documents, "<i8"),
    )
    prefix.with_suffix(".idx").write_bytes(
        header + b"".join(column.tobytes() for column in columns)
    )
    return prefix


@SAME_FOLDER
@given(lengths=LENGTHS, dtype=st.sampled_from(INTEGERS), data=st.data())
def test_any_range_reads_as_the_concatenation(
    write_corpus: WriteCorpus, lengths: list[int], dtype: str, data: st.DataObject
) -> None:
    documents = random_documents(lengths)
    corpus = IndexedTokens(write_corpus(documents, dtype=dtype))
    stream = np.concatenate(documents)
    start = data.draw(st.integers(0, len(stream) - 1))
    stop = data.draw(st.integers(start + 1, len(stream)))
    assert corpus.num_tokens == len(stream)
    assert corpus.num_documents == len(documents)
    assert corpus.read(start, stop).dtype == np.dtype(dtype)
    assert corpus.read(start, stop).tolist() == stream[start:stop].tolist()
    starts = np.unique(np.cumsum([0, *lengths[:-1]]))
    assert (
        corpus.document_starts(start, stop).tolist()
        == starts[(starts >= start) & (starts < stop)].tolist()
    )


@SAME_FOLDER
@given(lengths=LENGTHS, data=st.data())
def test_sequences_stored_in_any_order_read_in_the_order_of_the_index(
    tmp_path: Path, lengths: list[int], data: st.DataObject
) -> None:
    # given: documents stored in another order in the .bin
    documents = random_documents(lengths)
    stored = data.draw(st.permutations(range(len(documents))))
    pointers, begin = np.zeros(len(documents), dtype="<i8"), 0
    for document in stored:
        pointers[document], begin = 2 * begin, begin + lengths[document]
    tokens = np.concatenate([documents[document] for document in stored])
    # when
    corpus = IndexedTokens(
        _write_pair(tmp_path / "odd", tokens, lengths=lengths, pointers=pointers)
    )
    # then
    stream = np.concatenate(documents)
    assert corpus.num_tokens == len(stream)
    assert corpus.read(0, len(stream)).tolist() == stream.tolist()
    middle = len(stream) // 2
    assert corpus.read(middle, len(stream)).tolist() == stream[middle:].tolist()


def test_opening_builds_nothing_that_grows_with_the_corpus(write_corpus: WriteCorpus) -> None:
    corpus = IndexedTokens(write_corpus(random_documents([3] * 5000)))
    corpus.read(100, 200)
    assert corpus._offsets is None
    assert isinstance(corpus._pointers, np.memmap)
    assert len(pickle.dumps(corpus)) < 500


def test_a_copy_in_another_process_reads_the_same(write_corpus: WriteCorpus) -> None:
    corpus = IndexedTokens(write_corpus(random_documents([20, 30])))
    copy = pickle.loads(pickle.dumps(corpus))
    assert copy.read(5, 40).tolist() == corpus.read(5, 40).tolist()


def _damage(file: Path, offset: int, data: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[offset : offset + len(data)] = data
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("suffix", "offset", "data", "message"),
    [
        (".idx", 0, b"NOTANIDX", "is no Megatron-LM index"),
        (".idx", 9, b"\x02", "of index version 2"),
        (".idx", 17, b"\x07", r"dtype code 7 \(float32\)"),
        (".idx", 17, b"\x63", r"dtype code 99 \(unknown\)"),
        (".idx", 17, b"\x04", "has 100 bytes where its index asks for 200"),
        (".idx", 18, b"\x05", r"has 82 bytes where its header asks for 118"),
        (".idx", 34 + 24 + 16, b"\x01", r"document indices run over \[0, 1\]"),
        (".idx", 34, b"\xff" * 4, "sequence 0 has length -1 and pointer 0: neither is negative"),
        (
            ".idx",
            34 + 8 + 8,
            b"\x29",
            "sequence 1 has length 30 and pointer 41: .*multiples of 2 bytes",
        ),
        (".idx", 34 + 8 + 8, b"\xff" * 8, "sequence 1 has length 30 and pointer -1"),
        (".idx", 34 + 8 + 8, b"\x2a", "its sequences overlap or leave gaps at sequence 1"),
        (
            ".idx",
            34 + 24 + 8,
            b"\x03",
            "document 1 begins with sequence 3: the next one begins with sequence 2",
        ),
    ],
)
def test_a_damaged_index_is_refused_with_the_reason(
    write_corpus: WriteCorpus, suffix: str, offset: int, data: bytes, message: str
) -> None:
    prefix = write_corpus(random_documents([20, 30]))
    _damage(prefix.with_suffix(suffix), offset, data)
    with pytest.raises(DataError, match=message):
        IndexedTokens(prefix)


@pytest.mark.parametrize("missing", [1, 2, 50])
def test_a_truncated_bin_is_refused_with_both_sizes(
    write_corpus: WriteCorpus, missing: int
) -> None:
    prefix = write_corpus(random_documents([20, 30]))
    content = prefix.with_suffix(".bin").read_bytes()
    prefix.with_suffix(".bin").write_bytes(content[:-missing])
    with pytest.raises(DataError, match=f"has {100 - missing} bytes where its index asks for 100"):
        IndexedTokens(prefix)


def test_a_bin_larger_than_its_index_is_refused(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus(random_documents([20, 30]))
    with prefix.with_suffix(".bin").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match="has 104 bytes where its index asks for 100"):
        IndexedTokens(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_half_a_pair_is_refused(write_corpus: WriteCorpus, suffix: str) -> None:
    prefix = write_corpus(random_documents([20]))
    prefix.with_suffix(suffix).unlink()
    with pytest.raises(DataError, match=rf"corpus\{suffix} does not exist"):
        IndexedTokens(prefix)


def test_a_path_that_is_no_prefix_says_what_it_is(
    write_corpus: WriteCorpus, tmp_path: Path
) -> None:
    prefix = write_corpus(random_documents([20]))
    text = tmp_path / "texts" / "story.txt"
    text.parent.mkdir()
    text.write_text("once")
    cures = {
        text: f"story.txt is a file; make token files: nanotrain prepare --input {text} --output .*texts/story ",
        text.parent: f"nanotrain prepare --input {text.parent} --output .*texts-tokens ",
        prefix.parent: f"the folder .* has {prefix}; write for example --data-path {prefix}$",
        prefix.with_name(
            "corpse"
        ): f"the folder .* has {prefix}; write for example --data-path {prefix}$",
        tmp_path / "nowhere" / "corpus": "missing too; check the path",
    }
    for path, cure in cures.items():
        with pytest.raises(DataError, match=cure):
            IndexedTokens(path)


def test_an_empty_corpus_is_refused(write_corpus: WriteCorpus) -> None:
    with pytest.raises(DataError, match="empty corpus"):
        IndexedTokens(write_corpus([]))


@pytest.mark.parametrize("window", [(-1, 3), (4, 4), (45, 51), (50, 60)])
def test_a_range_outside_the_stream_is_an_error(
    write_corpus: WriteCorpus, window: tuple[int, int]
) -> None:
    corpus = IndexedTokens(write_corpus(random_documents([20, 30])))
    with pytest.raises(DataError, match=r"corpus cannot be read: the corpus has tokens \[0, 50\)"):
        corpus.read(*window)


@pytest.mark.parametrize(
    ("lengths", "pointers", "message"),
    [
        ([20, 30], [2, 42], "its sequences overlap or leave gaps at sequence 0"),
        ([19, 30], [2, 40], "has 100 bytes where its index asks for 98"),
    ],
)
def test_an_index_that_skips_the_first_tokens_is_refused(
    tmp_path: Path, lengths: list[int], pointers: list[int], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        IndexedTokens(
            _write_pair(tmp_path / "odd", np.arange(50), lengths=lengths, pointers=pointers)
        )


def test_a_document_may_have_no_sequence(tmp_path: Path) -> None:
    prefix = _write_pair(
        tmp_path / "odd", np.arange(5), lengths=[2, 3], pointers=[0, 4], documents=[0, 1, 1, 2]
    )
    assert IndexedTokens(prefix).document_starts(0, 5).tolist() == [0, 2]


# of ten sequences the pointers of 0, 2, 5 and 8 are checked on opening
LARGE = {"_CHECK_ALL": 3, "_CHECK_SOME": 4}


def _large_corpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stored: Sequence[int]
) -> IndexedTokens:
    """Ten sequences of two tokens, stored in this order, which are taken for more than can be
    checked on opening.
    """
    for name, number in LARGE.items():
        monkeypatch.setattr(indexed, name, number)
    pointers = [4 * stored.index(sequence) for sequence in range(10)]
    tokens = np.array([2 * sequence + half for sequence in stored for half in range(2)])
    return IndexedTokens(_write_pair(folder / "large", tokens, lengths=[2] * 10, pointers=pointers))


def test_disorder_that_the_checked_pointers_show_is_read_through_a_table(
    tmp_path, monkeypatch
) -> None:
    # each is followed by its next one
    corpus = _large_corpus(tmp_path, monkeypatch, [0, 1, 5, 6, 4, 7, 2, 3, 8, 9])
    assert corpus.read(0, 20).tolist() == list(range(20))


def test_disorder_between_them_is_found_when_it_is_read(tmp_path, monkeypatch) -> None:
    corpus = _large_corpus(tmp_path, monkeypatch, [0, 1, 2, 3, 7, 5, 6, 4, 8, 9])
    assert corpus.read(0, 6).tolist() == list(range(6))
    with pytest.raises(DataError, match="pointers are out of order near sequence 3"):
        corpus.read(6, 9)


def test_documents_out_of_order_are_found_when_they_are_read(tmp_path, monkeypatch) -> None:
    for name, number in LARGE.items():
        monkeypatch.setattr(indexed, name, number)
    documents = [0, 1, 2, 3, 5, 4, 6, 7, 8, 9, 10]  # those of 0, 3, 6 and 9 are checked on opening
    pair = {"lengths": [2] * 10, "pointers": range(0, 40, 4), "documents": documents}
    corpus = IndexedTokens(_write_pair(tmp_path / "large", np.arange(20), **pair))
    assert corpus.document_starts(12, 20).tolist() == [12, 14, 16, 18]
    for start in (6, 8):
        with pytest.raises(
            DataError,
            match="document 4 begins with sequence 5: the next one begins with sequence 4",
        ):
            corpus.document_starts(start, start + 2)


def test_short_reads_are_continued_and_a_file_cut_off_later_is_an_error(
    write_corpus, monkeypatch
) -> None:
    documents = random_documents([20, 30])
    corpus, pread = IndexedTokens(write_corpus(documents)), os.pread
    monkeypatch.setattr(
        remote.os, "pread", lambda handle, count, offset: pread(handle, min(count, 6), offset)
    )
    assert corpus.read(0, 50).tolist() == np.concatenate(documents).tolist()
    os.truncate(corpus.bin_file, 70)
    with pytest.raises(DataError, match="ended at byte 70: it had 100 bytes when it was opened"):
        corpus.read(0, 50)
