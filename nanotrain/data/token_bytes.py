"""Bytes of UTF-8 text per token, from which bits per byte are computed.

    bits per byte = loss in nats x tokens / ln 2 / bytes

Bits per byte compare models with different tokenizers, which the loss per token does not. A token
of a byte-level BPE may be a part of a character, so it is not decoded: its vocabulary entry has one
character per byte. Special tokens, such as the end-of-document token, have no bytes.

The bytes are those of the original text. A normalizer can change or remove characters, and unknown
tokens have no bytes: `prepare` records the documents whose tokens have other bytes than their text.
Where there are some, or where it is unknown, there are no bits per byte.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanotrain.data.corpus_info import read_info
from nanotrain.data.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer

# steps of a tokenizer that keep the bytes of a text
_KEEPING = {"ByteLevel", "Digits", "Punctuation", "Regex", "Sequence", "Split", "String"}
_BYTE_FALLBACK = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of text that tokens stand for.

    Attributes:
        sizes: bytes per token of the vocabulary.
        added: bytes of the blank that the tokenizer puts before a document.
        eod: the end-of-document token, after which a document begins; None if there is none.
        is_exact: whether the tokens of any document have the bytes of its text.
    """

    sizes: list[int]
    added: int
    eod: int | None
    is_exact: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> "TokenBytes | None":
        """The bytes of a tokenizer's tokens 0 to vocab_size - 1; None if they are unknown."""
        sizes = bytes_per_token(tokenizer, vocab_size)
        if sizes is None:
            return None
        # bytes of a document of one byte, beyond that byte: a blank that the tokenizer adds
        (ids,) = tokenizer.encode_documents(["a"])
        added = sum(sizes[token] for token in ids if token < vocab_size) - 1
        is_exact = added == 0 and not (
            isinstance(tokenizer, FastTokenizer) and _changes_text(tokenizer)
        )
        return cls(sizes, max(added, 0), tokenizer.eod, is_exact)

    def document_bytes(self, ids: Sequence[int]) -> int:
        """The bytes of a document's tokens."""
        return sum(map(self.sizes.__getitem__, ids)) - self.added

    def are_known(self, prefixes: Iterable[Path]) -> bool:
        """Whether the tokens of corpora have the bytes of their text."""
        for prefix in prefixes:
            uneven = read_info(prefix).uneven_documents
            is_even = self.is_exact if uneven is None else uneven == 0
            if not is_even or (self.added and self.eod is None):
                return False
        return True


def _changes_text(tokenizer: FastTokenizer) -> bool:
    """Whether a tokenizer has steps that can change or remove characters."""
    definition = json.loads(tokenizer.backend.to_str())
    stages = json.dumps([definition["normalizer"], definition["pre_tokenizer"]])
    kinds = set(re.findall(r'"type": "(\w+)"', stages))
    is_whole = '"behavior": "Removed"' not in stages and '"content": ""' not in stages
    has_unknown = definition["model"].get("unk_token") is not None
    if has_unknown or not is_whole or kinds - _KEEPING:
        return True
    added = tokenizer.backend.get_added_tokens_decoder()
    takes_blanks = any(token.lstrip or token.rstrip for token in added.values())
    # a special token without bytes can be a text, such as "!"
    texts = [token.content for token in added.values() if token.special]
    ids = tokenizer.encode_documents(texts)
    return takes_blanks or any(len(tokens) == 1 and tokens[0] in added for tokens in ids)


def bytes_per_token(tokenizer: Tokenizer, vocab_size: int) -> list[int] | None:
    """The bytes of the tokens 0 to vocab_size - 1; None if the entries cannot be read as bytes.

    >>> bytes_per_token(ByteTokenizer(), 258)[-3:]
    [1, 0, 0]
    """
    if isinstance(tokenizer, ByteTokenizer):
        return [int(token < 256) for token in range(vocab_size)]
    if not isinstance(tokenizer, FastTokenizer):
        return None
    settings = json.loads(tokenizer.backend.to_str())
    vocabulary_kind = _vocabulary_kind(settings)
    if vocabulary_kind is None:
        return None
    special_by_added = {entry["id"]: entry["special"] for entry in settings["added_tokens"]}
    sizes = [0] * vocab_size
    for text, token in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        is_special = special_by_added.get(token, False)
        if token >= vocab_size or is_special:
            continue
        kind = "text" if token in special_by_added else vocabulary_kind
        sizes[token] = _num_bytes(text, kind)
    return sizes


def _num_bytes(text: str, kind: str) -> int:
    """UTF-8 bytes that a vocabulary entry of a kind stands for."""
    if kind == "bytes":
        return len(text)
    if kind == "pieces":
        if _BYTE_FALLBACK.fullmatch(text):
            return 1
        text = text.replace("▁", " ")
    return len(text.encode())


def _vocabulary_kind(settings: dict[str, object]) -> str | None:
    """The kind of vocabulary entries: bytes, or pieces of text with U+2581 for a blank.

    None for other kinds.
    """
    stages = [settings.get(name) for name in ("pre_tokenizer", "decoder", "normalizer")]
    text = json.dumps(stages, ensure_ascii=False)
    if '"ByteLevel"' in text:
        return "bytes"
    if '"Metaspace"' in text or "▁" in text:
        return "pieces"
    return None
