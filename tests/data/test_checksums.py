"""Token files have a checksum per block: a few are checked when a corpus is opened, all on demand."""

from pathlib import Path

import numpy as np
import pytest

from nanotrain.cli.main import main
from nanotrain.data import checksums
from nanotrain.data.checksums import BlockSums, check_blocks, fingerprint
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.token_format import bin_path, idx_path, sums_path
from nanotrain.errors import DataError

LINE = ["--tokenizer", "bytes", "--workers", "1"]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of 10 blocks of 64 bytes."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    (tmp_path / "text.txt").write_text("x" * 300)
    assert (
        main(
            [
                "prepare",
                "--input",
                str(tmp_path / "text.txt"),
                "--output",
                str(tmp_path / "corpus"),
                *LINE,
            ]
        )
        == 0
    )
    return tmp_path / "corpus"


def flip(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 1
    path.write_bytes(content)


def test_sums_do_not_depend_on_how_the_bytes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    data, whole, parts = np.random.default_rng(0).bytes(150), BlockSums(), BlockSums()
    whole.add(data)
    for start in range(0, 150, 7):
        parts.add(data[start : start + 7])
    assert whole.to_bytes() == parts.to_bytes() and len(whole.to_bytes()) == 3 * 4


def test_a_corpus_whose_tokens_changed_is_refused_when_it_is_opened(corpus: Path) -> None:
    assert IndexedTokens(corpus).num_tokens == 301
    assert check_blocks(corpus) == 10
    flip(bin_path(corpus), *range(0, 602, 2))
    with pytest.raises(
        DataError,
        match="3 of 3 checked blocks differ from corpus.bin.crc32, the first from byte 0 on",
    ):
        IndexedTokens(corpus)


def test_one_changed_byte_is_found_by_verify(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["prepare", "--verify", str(corpus)])
    assert end.value.code == 0
    flip(bin_path(corpus), 100)
    IndexedTokens(corpus)  # blocks 0, 4 and 9
    assert main(["prepare", "--verify", f"{corpus}.bin"]) == 2
    assert (
        "1 of 10 checked blocks differ from corpus.bin.crc32, the first from byte 64 on"
        in capsys.readouterr().err
    )


def test_a_corpus_without_checksums_is_read_as_before(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sums_path(corpus).unlink()
    flip(bin_path(corpus), 0)
    assert IndexedTokens(corpus).num_tokens == 301
    assert main(["prepare", "--verify", str(corpus)]) == 2
    assert (
        "has no checksums: an older version or another program wrote it" in capsys.readouterr().err
    )


def test_checksums_of_another_length_are_one_error(corpus: Path) -> None:
    sums_path(corpus).write_bytes(b"")
    with pytest.raises(DataError, match="it has 10 blocks, corpus.bin.crc32 has checksums of 0"):
        IndexedTokens(corpus)


def test_every_block_is_checked_when_it_is_first_read(corpus: Path) -> None:
    flip(bin_path(corpus), 100)
    tokens = IndexedTokens(corpus)
    assert len(tokens.read(0, 32)) == 32  # block 0
    with pytest.raises(
        DataError, match="block from byte 64 on differs from its checksum; document 0 is read there"
    ):
        tokens.read(20, 40)
    flip(bin_path(corpus), 100)
    assert len(tokens.read(20, 40)) == 20
    flip(bin_path(corpus), 100)
    assert len(tokens.read(30, 40)) == 10  # once per process: the block was read and sound


def test_a_fingerprint_differs_where_the_tokens_do(corpus: Path) -> None:
    before = IndexedTokens(corpus).fingerprint
    assert before == IndexedTokens(corpus).fingerprint
    for path in (sums_path(corpus), bin_path(corpus), idx_path(corpus)):
        flip(path, 8)
        assert fingerprint(corpus) != before, path
        flip(path, 8)
    sums_path(corpus).unlink()
    assert fingerprint(corpus) != before
