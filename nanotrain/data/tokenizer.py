"""Text to token ids and back.

    "bytes"                              a token per byte, and one that ends a document
    tokenizer.json, a folder with one    read by `tokenizers` alone, in milliseconds
    any other folder, a Hugging Face name  through transformers (data/hf.py)

No special tokens are added while encoding: `prepare` itself ends each document with `eod`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from nanotrain.data import hf
from nanotrain.errors import DataError

# What tokenizers in the wild call the end of a document, for a bare tokenizer.json, which does not say.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    """What `prepare`, the trainer and `generate` need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def eod(self) -> int | None:
        """The token that ends a document; None where there is none."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        ...

    def save(self, folder: Path) -> str:
        """Leave a copy in a folder named so; returns what `load_tokenizer` finds beside it, a word or the folder."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and 256 to end a document.

    >>> ByteTokenizer().encode("hé")
    [104, 195, 169]
    """

    vocab_size: int = 257
    eod: int | None = 256

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode("utf-8", errors="replace"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of many texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of bytes; broken UTF-8 shows as replacement characters."""
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> str:
        """Nothing to leave: the word is enough."""
        return "bytes"


class FastTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
        backend: the tokenizer.
        end: the text of its end-of-document token; None to look for one by its usual names.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, end: str | None = None) -> None:
        self.backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        names = [end] if end is not None else _END_NAMES
        self.end = next((name for name in names if name in vocabulary), None)
        self.eod: int | None = None if self.end is None else vocabulary[self.end]
        self.vocab_size = max(vocabulary.values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """The ids of a text, on one thread."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on all threads `tokenizers` may use."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> str:
        """Write tokenizer.json and what transformers' AutoTokenizer needs beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.end}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        return folder.name


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: "bytes", the path of a tokenizer.json, a folder, or a Hugging Face name.

    Raises:
        DataError: nothing of that name can be read here.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return _read_fast(path / "tokenizer.json")
    if path.is_file():
        return _read_fast(path)
    loaded = hf.load_tokenizer(str(path) if path.is_dir() else name)
    backend = getattr(loaded, "backend_tokenizer", None)
    return FastTokenizer(backend, end=loaded.eos_token) if backend is not None else _SlowTokenizer(loaded)


class _SlowTokenizer:
    """A transformers tokenizer without a `tokenizers` backend."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.eod: int | None = wrapped.eos_token_id
        self.vocab_size = max(wrapped.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        return list(self.wrapped.encode(text, add_special_tokens=False))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.wrapped.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> str:
        self.wrapped.save_pretrained(str(folder))
        return folder.name


def _read_fast(file: Path) -> FastTokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"{file} is no tokenizer", why=str(error), fix="give a tokenizer.json that `tokenizers` saved"
        ) from None
    settings = file.with_name("tokenizer_config.json")
    end = json.loads(settings.read_text()).get("eos_token") if settings.is_file() else None
    return FastTokenizer(backend, end=end["content"] if isinstance(end, dict) else end)
