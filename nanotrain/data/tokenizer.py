"""Text to token ids and back.

    "bytes"                                one token per byte, and one end-of-document token
    tokenizer.json, a folder with one      loaded by `tokenizers` alone, in milliseconds
    vocab.json,merges.txt                  GPT-2's two files, by `tokenizers`
    any other folder, a Hugging Face name  loaded by transformers, which takes seconds to import

Encoding adds no special tokens; `prepare` ends each document with `eod`. Every tokenizer has

    vocab_size    one more than the largest id
    eod           the end-of-document token, None if there is none
    encode        text -> ids
    decode        ids -> text, without special tokens
    save          writes a folder and returns its name, or "bytes" if there is nothing to write
"""

import json
import socket
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import tokenizers

from nanotrain.errors import DataError
from nanotrain.paths import expanded, local_path
from nanotrain.runs.files import write_text
from nanotrain.untrusted import MAX_TOKENIZER_BYTES, parse_json, read_file, require_file, text_of

# Usual names of the end-of-document token, for a bare tokenizer.json, which does not name it.
_EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>", "[EOS]", "[SEP]")
_CONNECT_TIMEOUT_S = 3.0  # to the hub


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and 256 as end of document.

    >>> ByteTokenizer().encode("hé")
    [104, 195, 169]
    """

    vocab_size: int = 257
    eod: int | None = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode bytes; invalid UTF-8 gives replacement characters."""
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> str:
        """Write nothing: the name is enough to load it."""
        return "bytes"


class FastTokenizer:
    """A tokenizer of the `tokenizers` library, with `eod_text` or a usual name as end-of-document token.

    Truncation and padding stored in the file are switched off; transformers ignores them too.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, eod_text: str | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        names = [eod_text] if eod_text is not None else _EOD_NAMES
        self.eod_text = next((name for name in names if name in vocabulary), None)
        self.eod: int | None = None if self.eod_text is None else vocabulary[self.eod_text]
        self.vocab_size = max(vocabulary.values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Encode a text on one thread."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts on all threads that `tokenizers` may use."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> str:
        """Write tokenizer.json and the tokenizer_config.json that transformers' AutoTokenizer needs."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eod_text}
        write_text(folder / "tokenizer.json", self.backend.to_str(pretty=True))
        write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
        return folder.name


class SlowTokenizer:
    """A transformers tokenizer without a `tokenizers` backend."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.eod: int | None = wrapped.eos_token_id
        self.vocab_size = max(wrapped.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        return list(self.wrapped.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.wrapped.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> str:
        self.wrapped.save_pretrained(str(folder))
        return folder.name


Tokenizer: TypeAlias = ByteTokenizer | FastTokenizer | SlowTokenizer


def document_start(tokenizer: Tokenizer) -> list[int]:
    """The tokens before the first one of a document: the end of the previous document, or a line break.

    Raises:
        DataError: the tokenizer has neither.
    """
    start = [tokenizer.eod] if tokenizer.eod is not None else tokenizer.encode("\n")
    if not start:
        raise DataError(
            "an empty prompt has no tokens",
            why="the tokenizer has no end-of-document token and none for a line break",
            fix="give a prompt with text, or name an eos_token of the vocabulary in tokenizer_config.json",
        )
    return start


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer: "bytes", a tokenizer.json, GPT-2's "vocab.json,merges.txt", a folder, or a Hugging Face name.

    Raises:
        DataError: no tokenizer of that name can be loaded.
    """
    if name == "bytes":
        return ByteTokenizer()
    name = expanded(name)
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return _load_fast(file)
    vocab_file, comma, merge_file = name.partition(",")
    if comma:
        return _load_gpt2(vocab_file, merge_file)
    loaded = _load_pretrained(str(path) if path.is_dir() else name)
    backend = getattr(loaded, "backend_tokenizer", None)
    return FastTokenizer(backend, eod_text=loaded.eos_token) if backend is not None else SlowTokenizer(loaded)


def is_local(name: str) -> bool:
    """Whether a tokenizer's name stands for files on this machine or for bytes, not for a repository on the hub.

    >>> is_local("bytes"), is_local("gpt2")
    (True, False)
    """
    return name == "bytes" or all(local_path(part).exists() for part in name.split(","))


def _load_gpt2(vocab_file: str, merge_file: str) -> FastTokenizer:
    try:
        for name in (vocab_file, merge_file):
            require_file(Path(name), most=MAX_TOKENIZER_BYTES)
        backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab_file, merge_file))
    except Exception as error:  # the library raises bare Exception
        fix = "name GPT-2's two files with --vocab-file and --merge-file"
        raise DataError(f"{vocab_file} and {merge_file} are no tokenizer", why=str(error), fix=fix) from None
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = [name for name in _EOD_NAMES if backend.token_to_id(name) is not None]
    backend.add_special_tokens(special)
    return FastTokenizer(backend)


def _load_fast(file: Path) -> FastTokenizer:
    settings = file.with_name("tokenizer_config.json")
    eod_text = _eos_of(settings) if settings.is_file() else None
    try:
        content = read_file(file, most=MAX_TOKENIZER_BYTES)
        tokenizer = FastTokenizer(tokenizers.Tokenizer.from_buffer(content), eod_text=eod_text)
        tokenizer.decode(tokenizer.encode("a b"))  # a damaged file may load and fail at the first text
    except BaseException as error:  # the library raises bare Exception, and its panics are no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise DataError(
            f"{file} is no tokenizer", why=str(error), fix="give a tokenizer.json that `tokenizers` saved"
        ) from None
    return tokenizer


def _eos_of(settings: Path) -> str | None:
    """The text of the end-of-document token that a tokenizer_config.json names."""
    try:
        eos = parse_json(read_file(settings), allow_nan=True)["eos_token"]
        eos = eos["content"] if isinstance(eos, dict) else eos
        return None if eos is None else text_of(eos, "eos_token")
    except KeyError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{settings} cannot be read", why=str(error), fix="correct or remove it") from None


def _load_pretrained(name: str) -> Any:
    """Load a transformers tokenizer by Hugging Face name or folder; never runs code from the repository."""
    if not Path(name).is_dir():
        go_offline_if_unreachable()
    from transformers import AutoTokenizer

    try:
        # False, not None: None asks on the terminal, and "y" would run the repository's code.
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, ImportError, KeyError: depends on the repository
        what = "is a folder without tokenizer.json" if Path(name).is_dir() else "is no local tokenizer.json or folder"
        raise DataError(
            f"the tokenizer {name} cannot be loaded",
            why=f"it {what}, and Hugging Face reports: {first_line(error)}",
            fix="without a network give a folder with a tokenizer.json, 'bytes', or in prepare bpe:8192",
        ) from None


def go_offline_if_unreachable() -> None:
    """Switch the hub client to its cache if the hub does not accept a connection.

    The client itself would try five times, half a minute (measured), before it reports that there is no network.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
