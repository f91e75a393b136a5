"""Token files read back what was written, in stream offsets, and damaged ones are refused with a reason."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.token_format import DTYPES, IndexHeader
from nanotrain.errors import DataError
from tests.data.conftest import WriteCorpus, random_documents

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)
INTEGERS = [dtype.name for dtype in DTYPES.values() if dtype.kind != "f"]
SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


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
    assert corpus.document_starts(start, stop).tolist() == starts[(starts >= start) & (starts < stop)].tolist()


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
    (tmp_path / "odd.bin").write_bytes(tokens.astype("<u2").tobytes())
    header = IndexHeader(np.dtype("<u2"), len(lengths), len(lengths) + 1).pack()
    columns = np.asarray(lengths, "<i4").tobytes() + pointers.tobytes() + np.arange(len(lengths) + 1).tobytes()
    (tmp_path / "odd.idx").write_bytes(header + columns)
    # when
    corpus = IndexedTokens(tmp_path / "odd")
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
        (".idx", 34 + 24 + 16, b"\x01", r"document indices that run over \[0, 1\]"),
        (".idx", 34, b"\xff" * 4, "sequence 0 has a negative length"),
        (".idx", 34 + 8 + 8, b"\x29", "sequence 1 has a pointer that is no multiple of 2"),
        (".idx", 34 + 8 + 8, b"\xff" * 8, "sequence 1 has a negative pointer"),
        (".idx", 34 + 8 + 8, b"\x2a", "its sequences overlap or leave gaps at sequence 1"),
        (".idx", 34 + 24 + 8, b"\x03", "document 1 begins with sequence 3: the next one begins with sequence 2"),
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
def test_a_truncated_bin_is_refused_with_both_sizes(write_corpus: WriteCorpus, missing: int) -> None:
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


def test_a_path_that_is_no_prefix_says_what_it_is(write_corpus: WriteCorpus, tmp_path: Path) -> None:
    prefix = write_corpus(random_documents([20]))
    text = tmp_path / "texts" / "story.txt"
    text.parent.mkdir()
    text.write_text("once")
    cures = {
        text: f"story.txt is a file; make token files: nanotrain prepare --input {text} --output .*texts/story ",
        text.parent: f"nanotrain prepare --input {text.parent} --output .*texts-tokens ",
        prefix.parent: f"the folder .* has {prefix}; write --data-path {prefix}$",
        prefix.with_name("corpse"): f"the folder .* has {prefix}; write --data-path {prefix}$",
        tmp_path / "nowhere" / "corpus": "missing too; check the path",
    }
    for path, cure in cures.items():
        with pytest.raises(DataError, match=cure):
            IndexedTokens(path)


def test_an_empty_corpus_is_refused(write_corpus: WriteCorpus) -> None:
    with pytest.raises(DataError, match="empty corpus"):
        IndexedTokens(write_corpus([]))


@pytest.mark.parametrize("window", [(-1, 3), (4, 4), (45, 51), (50, 60)])
def test_a_range_outside_the_stream_is_an_error(write_corpus: WriteCorpus, window: tuple[int, int]) -> None:
    corpus = IndexedTokens(write_corpus(random_documents([20, 30])))
    with pytest.raises(DataError, match=r"corpus cannot be read: the corpus has tokens \[0, 50\)"):
        corpus.read(*window)
