"""Bytes per token add up to the bytes of the text, for every kind of tokenizer."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from nanotrain.data.corpus_info import CorpusInfo, write_info
from nanotrain.data.token_bytes import TokenBytes, bytes_per_token
from nanotrain.data.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer, load_tokenizer
from tests.data.tokenizer_kinds import KINDS, texts_for, write_kind

TEXT = "die Größe of naïve café, 中文 and 🙂 "


def byte_level() -> FastTokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    return FastTokenizer(backend)


def metaspace() -> FastTokenizer:
    fallback = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary = fallback | {
        text: 256 + number for number, text in enumerate(["▁", "ö", "é", "a", "n", "d", "an"])
    }
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "n")], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return FastTokenizer(backend)


def total(tokenizer: Tokenizer) -> int:
    sizes = bytes_per_token(tokenizer, tokenizer.vocab_size + 5)
    assert sizes is not None and sizes[-5:] == [0] * 5
    return sum(sizes[token] for token in tokenizer.encode(TEXT))


def test_the_bytes_of_all_tokens_are_those_of_the_text() -> None:
    for tokenizer in (ByteTokenizer(), byte_level(), metaspace()):
        assert total(tokenizer) == len(TEXT.encode()), tokenizer


def test_the_end_of_a_document_has_no_bytes() -> None:
    tokenizer = byte_level()
    sizes = bytes_per_token(tokenizer, tokenizer.vocab_size)
    assert sizes is not None and tokenizer.eod is not None and sizes[tokenizer.eod] == 0


def test_words_without_a_mark_for_blanks_are_unknown() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert bytes_per_token(FastTokenizer(words), 2) is None


# kinds whose tokens always have the bytes of the text
EXACT = {
    "byte-level", "gpt2", "gpt2 two files", "gpt2 dropout",
    "special_tokens_map", "split_special_tokens", "eos outside the vocabulary", "llama3",
    "llama3 ignore_merges", "llama class, byte-level", "gpt4 regex", "deepseek",
    "bloom", "added_tokens",
}  # fmt: skip


@pytest.mark.parametrize("name", ["bytes", *KINDS])
def test_the_bytes_of_a_document_are_those_of_its_text_or_unknown(
    name: str, tmp_path: Path
) -> None:
    folder = "bytes" if name == "bytes" else str(write_kind(name, tmp_path / "kind"))
    tokenizer = load_tokenizer(folder)
    known = TokenBytes.of(tokenizer, tokenizer.vocab_size)
    if known is None or not known.is_exact:
        assert name not in EXACT
        return
    texts = [text for text in texts_for(["<s>"]) if text]
    for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True):
        assert known.document_bytes(ids) == len(text.encode()), text


def test_a_corpus_whose_text_was_changed_has_no_bits_per_byte(tmp_path: Path) -> None:
    exact = TokenBytes.of(ByteTokenizer(), 257)
    normalizes = load_tokenizer(str(write_kind("qwen2", tmp_path / "qwen")))
    inexact = TokenBytes.of(normalizes, normalizes.vocab_size)
    prefix = tmp_path / "corpus"
    assert exact is not None and inexact is not None
    assert exact.are_known([prefix]) and not inexact.are_known([prefix])  # nothing is recorded
    for uneven, expected in ((0, True), (3, False)):
        write_info(prefix, CorpusInfo("bytes", uneven_documents=uneven))
        assert exact.are_known([prefix]) is inexact.are_known([prefix]) is expected


def test_the_blank_before_a_document_is_no_byte_of_its_text(tmp_path: Path) -> None:
    llama = load_tokenizer(str(write_kind("llama", tmp_path / "llama")))
    known = TokenBytes.of(llama, llama.vocab_size)
    assert known is not None and known.added == 1 and known.eod == llama.eod
    (ids,) = llama.encode_documents([TEXT])
    assert known.document_bytes(ids) == len(TEXT.encode())
