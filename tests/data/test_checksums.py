"""Token files have a checksum per block: a few are checked when a corpus is opened, all on demand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanotrain.cli.main import main
from nanotrain.config.config import DataConfig
from nanotrain.data import checksums
from nanotrain.data.build import build_data, fingerprints, require_same_corpora
from nanotrain.data.checksums import BlockSums, check_blocks, fingerprint, is_same_corpus
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.token_format import bin_path, idx_path, mask_path, sums_of, sums_path
from nanotrain.errors import DataError
from nanotrain.prepare.token_writer import TokenWriter

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
    assert list(check_blocks(corpus).values()) == [10, 1]
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
    assert IndexedTokens(corpus).unchecked == []
    sums_of(idx_path(corpus)).unlink()
    assert IndexedTokens(corpus).unchecked == ["corpus.idx"]
    sums_path(corpus).unlink()
    assert IndexedTokens(corpus).unchecked == ["corpus.bin", "corpus.idx"]
    flip(bin_path(corpus), 0)
    assert IndexedTokens(corpus).num_tokens == 301
    assert main(["prepare", "--verify", str(corpus)]) == 2
    assert (
        "has no checksums: an older version or another program wrote it" in capsys.readouterr().err
    )


def test_checksums_of_another_length_are_one_error(corpus: Path) -> None:
    sums = sums_path(corpus).read_bytes()
    for size in (0, 3, 7):  # cut inside of a checksum, too
        sums_path(corpus).write_bytes(sums[:size])
        found = size // 4
        with pytest.raises(
            DataError, match=f"10 blocks, corpus.bin.crc32 has checksums of {found}"
        ):
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
    for path in (sums_path(corpus), bin_path(corpus), idx_path(corpus), sums_of(idx_path(corpus))):
        flip(path, 3)
        assert fingerprint(corpus) != before, path
        flip(path, 3)
    sums_path(corpus).unlink()
    assert fingerprint(corpus) != before


@pytest.fixture
def masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of one document with a mask of five blocks."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    prefix = tmp_path / "talks"
    with TokenWriter(prefix, np.dtype("<u2"), has_mask=True) as writer:
        writer.add_documents([[7] * 300], [np.arange(300) % 2])
        writer.complete()
        for path, sums in writer.checksums().items():
            path.write_bytes(sums)
    return prefix


@pytest.mark.parametrize(
    "damage", [lambda mask: bytes(300), lambda mask: b"\1" * 300, lambda mask: b"\xff" * 300]
)
def test_a_mask_that_changed_is_refused_when_it_is_opened(
    masked: Path, damage: Callable[[bytes], bytes]
) -> None:
    """All zeros and all ones are masks too, of other targets."""
    assert IndexedTokens(masked).read_mask(0, 4).tolist() == [0, 1, 0, 1]
    assert list(check_blocks(masked).values()) == [10, 1, 5]
    mask_path(masked).write_bytes(damage(mask_path(masked).read_bytes()))
    with pytest.raises(DataError, match=r"talks.mask is not as it was written: 3 of 3 checked"):
        IndexedTokens(masked)


def test_one_flipped_bit_of_a_mask_is_found_where_it_is_read_and_by_verify(
    masked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(mask_path(masked), 70)
    tokens = IndexedTokens(masked)  # blocks 0, 2 and 4
    assert tokens.read_mask(0, 64).sum() == 32
    with pytest.raises(DataError, match="talks.mask is not .* from byte 64 on .* document 0 is"):
        tokens.read_mask(60, 70)
    assert main(["prepare", "--verify", str(masked)]) == 2
    assert "1 of 5 checked blocks differ from talks.mask.crc32" in capsys.readouterr().err


def test_an_old_mask_is_named_and_its_values_are_checked(
    masked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sums_of(mask_path(masked)).unlink()
    flip(mask_path(masked), 70)  # zeros and ones still
    tokens = IndexedTokens(masked)
    assert tokens.unchecked == ["talks.mask"] and tokens.read_mask(60, 80).sum() == 11
    with pytest.raises(SystemExit):
        main(["prepare", "--verify", str(masked)])
    assert "talks.mask: not checked: it has no checksums" in capsys.readouterr().out
    mask = bytearray(mask_path(masked).read_bytes())
    mask[101] = 3
    mask_path(masked).write_bytes(mask)
    with pytest.raises(DataError, match=r"talks.mask has 3 at token 101: .* 1 for a target"):
        IndexedTokens(masked).read_mask(64, 128)


def test_a_fingerprint_has_the_mask(masked: Path) -> None:
    """Between a stop and a resume; that of an older version says nothing of it."""
    before = IndexedTokens(masked).fingerprint
    content = mask_path(masked).read_bytes()
    flip(sums_of(mask_path(masked)), 5)
    assert not is_same_corpus(before, fingerprint(masked))
    sums_of(mask_path(masked)).unlink()
    assert not is_same_corpus(before, fingerprint(masked))
    mask_path(masked).unlink()
    without = fingerprint(masked)
    assert not is_same_corpus(before, without) and not is_same_corpus(without, before)
    old = before.partition("-")[0]
    assert is_same_corpus(old, before) and is_same_corpus(old, without)
    mask_path(masked).write_bytes(content)
    assert not is_same_corpus("0badcafe", fingerprint(masked))


def test_an_index_that_changed_is_refused(corpus: Path, tmp_path: Path) -> None:
    """Lengths and pointers of other documents may still be a sound index."""
    flip(idx_path(corpus), 40)
    with pytest.raises(DataError, match="corpus.idx is not as it was written: 1 of 1 checked"):
        IndexedTokens(corpus)


def write_blocks(
    prefix: Path, tokens: np.ndarray, lengths: list[int], *, has_sums: bool = True
) -> None:
    """A corpus with documents of some lengths, and its checksums."""
    borders = np.cumsum(lengths)[:-1]
    with TokenWriter(prefix, np.dtype("uint16")) as writer:
        writer.add_documents([part.tolist() for part in np.split(tokens, borders)])
    if has_sums:
        sums = BlockSums()
        sums.add(bin_path(prefix).read_bytes())
        sums_path(prefix).write_bytes(sums.to_bytes())
    else:
        sums_path(prefix).unlink(missing_ok=True)


@pytest.mark.parametrize("has_sums", [True, False], ids=["prepared", "Megatron-LM's"])
def test_another_corpus_of_equal_size_has_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_sums: bool
) -> None:
    """Sizes of both files are equal. With checksums every token counts; without them those of the
    blocks that are read, and every border of a document.
    """
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    prefix, lengths = tmp_path / "corpus", [100, 60, 80, 80]
    tokens = np.random.default_rng(0).integers(0, 900, 320)

    def fingerprint_of(ids: np.ndarray, of_documents: list[int]) -> str:
        write_blocks(prefix, ids, of_documents, has_sums=has_sums)
        return fingerprint(prefix)

    before = fingerprint_of(tokens, lengths)
    assert fingerprint_of(tokens, lengths) == before, "the same corpus, written again"
    num_blocks = 10
    for block in range(num_blocks):  # 32 tokens each
        changed = tokens.copy()
        changed[32 * block + 7] += 1
        is_read = has_sums or block in (0, 4, num_blocks - 1)
        assert (fingerprint_of(changed, lengths) != before) == is_read, block
    for number in range(len(lengths) - 1):
        moved = list(lengths)
        moved[number] += 1
        moved[number + 1] -= 1
        assert fingerprint_of(tokens, moved) != before, number
    assert fingerprint_of(tokens[::-1], lengths[::-1]) != before


def test_a_run_goes_on_with_its_corpora_alone(tmp_path: Path) -> None:
    """Another corpus of the name and size of one that the run has read is refused, by its prefix."""
    tokens = np.random.default_rng(1).integers(0, 900, 320)
    for name in ("a", "b"):
        write_blocks(tmp_path / name, tokens, [320])
    data = DataConfig(
        data_path=["1", str(tmp_path / "a"), "1", str(tmp_path / "b")], split="1", seq_length=8
    )

    def splits() -> Any:
        return build_data(data, vocab_size=1000, seed=0, required=["train"]).train

    saved = fingerprints(splits())
    assert {*saved} == {str(tmp_path / name) for name in ("a", "b")}
    require_same_corpora(splits(), saved)
    require_same_corpora(splits(), {})  # of a checkpoint that has none
    write_blocks(tmp_path / "b", np.roll(tokens, 1), [320])
    with pytest.raises(DataError, match=f"{tmp_path / 'b'} is not the corpus that the run has"):
        require_same_corpora(splits(), saved)


@pytest.mark.parametrize("left", [1, 3, 6])
def test_truncated_checksums_are_an_error(corpus: Path, left: int) -> None:
    sums_path(corpus).write_bytes(sums_path(corpus).read_bytes()[:left])
    with pytest.raises(DataError, match=rf"checksums of {left // 4}"):
        IndexedTokens(corpus)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128])
def test_every_block_that_has_a_byte_has_one_checksum(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    sums = BlockSums()
    sums.add(bytes(size))
    assert len(sums.to_bytes()) == 4 * -(-size // 64)
