"""Bytes of UTF-8 text per token, from which bits per byte are computed.

    bits per byte = loss in nats x tokens / ln 2 / bytes

Bits per byte compare models with different tokenizers, which the loss per token does not. A token
of a byte-level BPE may be a part of a character, so it is not decoded: its vocabulary entry has one
character per byte. Special tokens, such as the end-of-document token, have no bytes.
"""

import json
import re

from nanotrain.data.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer

_BYTE_FALLBACK = re.compile("<0x[0-9A-F]{2}>")


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
