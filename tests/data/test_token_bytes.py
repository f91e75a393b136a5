"""Bytes per token add up to the bytes of the text, for every kind of tokenizer."""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from nanotrain.data.token_bytes import bytes_per_token
from nanotrain.data.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer

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
