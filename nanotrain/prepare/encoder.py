"""Encode documents, and count tokens and characters that are not what the text says."""

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from nanotrain.data.token_bytes import TokenBytes
from nanotrain.data.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer
from nanotrain.prepare.text_counts import TextCounts, special_texts

# steps that can remove characters other than blanks
_REMOVING = {
    "BertNormalizer",
    "CharDelimiterSplit",
    "Nmt",
    "Precompiled",
    "Strip",
    "StripAccents",
}
_BYTE_CHARACTERS = ByteLevel.alphabet()


class DocumentEncoder:
    """Encodes documents with a tokenizer, and counts documents and tokens in `counts`.

    Args:
        tokenizer: the tokenizer of the corpus.
        parse_special: whether a special token written in a document becomes its id.
    """

    def __init__(self, tokenizer: Tokenizer, *, parse_special: bool = False) -> None:
        self.tokenizer = tokenizer
        self.parse_special = parse_special
        special = special_texts(tokenizer)
        self._special = _pattern(special)
        # looked for first: a pattern of hundreds of texts is slow
        self._special_starts = {text[:2] for text in special if text}
        self._unknown = _unknown_id(tokenizer)
        self._can_lose = can_lose_characters(tokenizer)
        self._bytes = TokenBytes.of(tokenizer, tokenizer.vocab_size)
        self.counts = TextCounts()

    def encode(self, text: str) -> list[int]:
        """Encode a document, without an end-of-document token."""
        tokenizer = self.tokenizer
        (ids,) = tokenizer.encode_documents([text], parse_special=self.parse_special)
        has_special = False
        if self._special is not None and any(start in text for start in self._special_starts):
            has_special = self._special.search(text) is not None
        lost = 0
        if self._can_lose and isinstance(tokenizer, FastTokenizer):
            lost = num_lost(tokenizer, text)
        unknown = 0 if self._unknown is None else ids.count(self._unknown)
        is_uneven = self._bytes is None or self._bytes.document_bytes(ids) != len(text.encode())
        if has_special or lost or unknown or is_uneven:
            document_counts = TextCounts(
                special=int(has_special), unknown=unknown, lost=lost, uneven=int(is_uneven)
            )
            self.counts = TextCounts.total([self.counts, document_counts])
        return ids


def _pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds any of some texts; None without texts."""
    escaped = [re.escape(text) for text in sorted(texts, key=len, reverse=True) if text]
    return re.compile("|".join(escaped)) if escaped else None


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id of the unknown token; None if there is none."""
    if isinstance(tokenizer, ByteTokenizer):
        return None
    if not isinstance(tokenizer, FastTokenizer):
        unknown: int | None = tokenizer.wrapped.unk_token_id
        return unknown
    model = tokenizer.backend.model
    text = getattr(model, "unk_token", None)
    if text is not None:
        return tokenizer.backend.token_to_id(text)
    return _definition(tokenizer)["model"].get("unk_id")


def _definition(tokenizer: FastTokenizer) -> dict[str, Any]:
    """The tokenizer.json of a tokenizer."""
    definition: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    return definition


def can_lose_characters(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer can leave out characters, by the steps in its tokenizer.json."""
    if not isinstance(tokenizer, FastTokenizer):
        return False
    definition = _definition(tokenizer)
    normalizer = json.dumps(definition["normalizer"])
    pre_tokenizer = json.dumps(definition["pre_tokenizer"])
    removes = '"content": ""' in normalizer or '"behavior": "Removed"' in pre_tokenizer
    steps = set(re.findall(r'"type": "(\w+)"', normalizer + pre_tokenizer))
    model = definition["model"]
    return removes or bool(steps & _REMOVING) or _lacks_characters(model, steps)


def _lacks_characters(model: dict[str, Any], steps: set[str]) -> bool:
    """Whether the BPE model of a tokenizer.json leaves out characters that it does not know."""
    if model.get("type") != "BPE" or model.get("unk_token") is not None:
        return False
    if "ByteLevel" in steps:
        return not all(character in model["vocab"] for character in _BYTE_CHARACTERS)
    return not (model.get("byte_fallback") and "<0xFF>" in model["vocab"])


def num_lost(tokenizer: FastTokenizer, text: str) -> int:
    """The characters of a text, blanks left out, that no token stands for."""
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    edges = np.zeros(len(text) + 1, dtype=np.int64)
    spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    np.add.at(edges, spans[:, 0], 1)
    np.add.at(edges, spans[:, 1], -1)
    is_lost = np.cumsum(edges[:-1]) <= 0
    return sum(not text[index].isspace() for index in np.flatnonzero(is_lost))
