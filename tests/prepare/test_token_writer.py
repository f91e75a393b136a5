"""Written pairs are Megatron-LM's byte for byte, concatenate, and appear only when complete."""

import struct
import tempfile
import zlib
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.data import checksums
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.token_format import HEADER, sums_of
from nanotrain.prepare.token_writer import TokenWriter

DOCUMENTS = st.lists(st.lists(st.integers(0, 65535), max_size=20), max_size=4)
BATCHES = st.lists(DOCUMENTS, max_size=3)


def _write(prefix: Path, *documents: list[int]) -> Path:
    with TokenWriter(prefix, np.dtype("uint16")) as writer:
        for document in documents:
            writer.add_documents([document])
    return prefix


def test_the_files_are_megatrons_byte_for_byte(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "corpus", [1, 2, 3], [65000])
    assert prefix.with_suffix(".bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 65000)
    assert prefix.with_suffix(".idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QB", 1, 8)
        + struct.pack("<QQ", 2, 3)
        + struct.pack("<2i", 3, 1)
        + struct.pack("<2q", 0, 6)
        + struct.pack("<3q", 0, 1, 2)
    )


def test_pointers_lie_beyond_what_32_bits_hold(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "corpus", np.dtype("uint16")) as writer:
        writer._lengths = [np.full(3, 2**30, dtype="<i4")]  # of tokens that are not there
    pointers = np.frombuffer(
        (tmp_path / "corpus.idx").read_bytes(), dtype="<i8", count=3, offset=HEADER.size + 12
    )
    assert pointers.tolist() == [0, 2**31, 2**32]


def test_pairs_are_appended_in_order(tmp_path: Path) -> None:
    parts = [
        _write(tmp_path / "0", [1, 2], [3]),
        _write(tmp_path / "1"),
        _write(tmp_path / "2", [4, 5, 6]),
    ]
    with TokenWriter(tmp_path / "all", np.dtype("uint16")) as writer:
        for part in parts:
            writer.append_pair(part)
        assert (writer.num_documents, writer.num_tokens) == (3, 6)
    _write(tmp_path / "once", [1, 2], [3], [4, 5, 6])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"all{suffix}").read_bytes() == (tmp_path / f"once{suffix}").read_bytes()
    assert IndexedTokens(tmp_path / "all").document_start(2) == 3


def test_an_exception_while_writing_leaves_no_pair(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), TokenWriter(tmp_path / "half", np.dtype("uint16")) as writer:
        writer.add_documents([[1, 2]])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_an_older_pair_stays_until_the_new_one_is_complete_and_files_of_others_always(
    tmp_path: Path,
) -> None:
    prefix, scratch = _write(tmp_path / "corpus", [1, 2, 3]), tmp_path / "scratch"
    scratch.mkdir()
    before = {
        path: path.read_bytes() for path in (prefix.with_suffix(".bin"), prefix.with_suffix(".idx"))
    }
    (foreign := tmp_path / "corpus.bin.partial").write_text("mine")
    with (
        pytest.raises(RuntimeError),
        TokenWriter(prefix, np.dtype("uint16"), scratch=scratch) as writer,
    ):
        writer.add_documents([[4]])
        assert [path.parent for path in tmp_path.rglob("*.partial") if path != foreign] == [scratch]
        raise RuntimeError
    assert {path: path.read_bytes() for path in before} == before
    with TokenWriter(prefix, np.dtype("uint16"), scratch=scratch) as writer:
        writer.add_documents([[4]])
    assert IndexedTokens(prefix).num_tokens == 1
    assert foreign.read_text() == "mine" and not list(scratch.iterdir())


def test_two_writers_of_one_pair_do_not_mix(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "corpus", np.dtype("uint16")) as first:
        first.add_documents([[1, 2, 3]])
        with TokenWriter(tmp_path / "corpus", np.dtype("uint16")) as second:
            second.add_documents([[4]])
        first.add_documents([[5]])
    assert IndexedTokens(tmp_path / "corpus").num_tokens == 4


@settings(deadline=None, max_examples=25)
@given(batches=BATCHES, has_mask=st.booleans())
def test_checksums_are_those_of_the_bytes_of_every_file(
    batches: list[list[list[int]]], has_mask: bool
) -> None:
    with tempfile.TemporaryDirectory() as name, patch.object(checksums, "BLOCK_BYTES", 16):
        prefix = Path(name) / "corpus"
        with TokenWriter(prefix, np.dtype("uint16"), has_mask=has_mask) as writer:
            for documents in batches:
                masks = [np.arange(len(document)) % 2 for document in documents]
                writer.add_documents(documents, masks if has_mask else ())
        sums = writer.checksums()
        written = {sums_of(file): file.read_bytes() for file in Path(name).iterdir()}
    expected = {}
    for file, data in written.items():
        blocks = [data[start : start + 16] for start in range(0, len(data), 16)]
        expected[file] = b"".join(zlib.crc32(block).to_bytes(4, "little") for block in blocks)
    assert sums == expected and len(sums) == 2 + has_mask


def test_no_file_of_an_older_pair_stays(tmp_path: Path) -> None:
    for has_mask in (True, False, True):
        with TokenWriter(tmp_path / "a", np.dtype("uint16"), has_mask=has_mask) as writer:
            writer.add_documents([[1, 2]], [np.ones(2)] if has_mask else ())
        for path, sums in writer.checksums().items():
            path.write_bytes(sums)
        kinds = ["bin", "idx", "mask"][: 2 + has_mask]
        expected = {f"a.{kind}{end}" for kind in kinds for end in ("", ".crc32")}
        assert {path.name for path in tmp_path.iterdir()} == expected
