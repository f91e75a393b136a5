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
    bos           the token that begins a prompt, None if there is none
    adds_special  whether prompts have the special tokens that the tokenizer adds
    encode_added  text -> ids, with the special tokens that the tokenizer adds (data/prompts.py)
    save          writes a folder and returns its name, or "bytes" if there is nothing to write

The folder holds all files that the tokenizer was loaded from, and what else transformers'
AutoTokenizer needs.
"""

import json
import os
import socket
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import tokenizers

from nanotrain.errors import DataError
from nanotrain.runs.files import write_bytes
from nanotrain.untrusted import (
    MAX_TOKENIZER_BYTES,
    object_of,
    parse_json,
    read_file,
    text_of,
    unreadable,
)

# Usual names of the end-of-document token, for a bare tokenizer.json, which does not name it.
_EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>", "[EOS]", "[SEP]")
_CONNECT_TIMEOUT_S = 3.0  # for a connection to the hub
Files: TypeAlias = Mapping[str, bytes] | None  # contents of files by name
_ANY_CLASS = "PreTrainedTokenizerFast"  # transformers' class of whatever a tokenizer.json holds
VOCABULARY, SETTINGS = "tokenizer.json", "tokenizer_config.json"
# vocabulary files of a Hugging Face folder; one of them is enough
VOCABULARY_FILES = (VOCABULARY, "tokenizer.model", "vocab.json")
# Files of a tokenizer in a Hugging Face folder, and the settings of generation, which name its
# tokens.
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and 256 as end of document.

    >>> ByteTokenizer().encode("hé")
    [104, 195, 169]
    """

    vocab_size: int = 257
    eod: int | None = 256
    bos: int | None = None
    adds_special: bool = True
    start_text: str | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def encode_added(self, text: str) -> list[int]:
        """The bytes: there is no special token to add."""
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode bytes; invalid UTF-8 gives replacement characters."""
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> str:
        """Write nothing: the name is enough to load it."""
        return "bytes"

    def as_fast(self) -> "FastTokenizer":
        """The same tokenizer as a byte-level BPE without merges, which other libraries load."""
        # bytes that GPT-2 writes as their own character come first in its alphabet
        plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = [byte for byte in range(256) if byte not in plain]
        characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        vocabulary = dict(zip(characters, [*sorted(plain), *others], strict=True))
        backend = _byte_level(tokenizers.models.BPE(vocabulary, merges=[]))
        backend.add_special_tokens([_EOD_NAMES[0]])
        backend.encode_special_tokens = True  # text never becomes an end-of-document token
        settings = {
            "tokenizer_class": _ANY_CLASS,
            "eos_token": _EOD_NAMES[0],
            "split_special_tokens": True,
        }
        return FastTokenizer(backend, files={SETTINGS: _json_bytes(settings)})


class FastTokenizer:
    """A tokenizer of the `tokenizers` library.

    Truncation and padding stored in the file are switched off; transformers ignores them too.

    Args:
        backend: the tokenizer of the library.
        eod_text: text of the end-of-document token; None for a usual name.
        bos_text: text of the token that begins a prompt; None if there is none.
        files: contents of the files that it was loaded from, by their names in a folder.
    """

    adds_special = True

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eod_text: str | None = None,
        bos_text: str | None = None,
        files: Files = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.files = dict(files or {})
        vocabulary = backend.get_vocab(with_added_tokens=True)
        names = [eod_text] if eod_text is not None else _EOD_NAMES
        self.eod_text = next((name for name in names if name in vocabulary), None)
        self.eod: int | None = None if self.eod_text is None else vocabulary[self.eod_text]
        self.bos: int | None = None if bos_text is None else vocabulary.get(bos_text)
        self.start_text = self.eod_text if self.bos is None else bos_text
        self.vocab_size = max(vocabulary.values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Encode a text on one thread."""
        return self.encode_batch([text])[0]

    def encode_added(self, text: str) -> list[int]:
        """Encode a text with the special tokens that the post-processor adds."""
        return list(self.backend.encode(text).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts on all threads that `tokenizers` may use."""
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path, *, as_any_class: bool = False) -> str:
        """Write the files it was loaded from, and settings that name its end-of-document token.

        Args:
            folder: created if absent; the settings are written last.
            as_any_class: the settings name no class of a model family, which would build another
                tokenizer from the vocabulary.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = {VOCABULARY: self.backend.to_str(pretty=True).encode(), **self.files}
        settings = parse_json(self.files.get(SETTINGS, b"{}"), allow_nan=True)
        names_eod = _named_token(settings, "eos_token") == self.eod_text
        if as_any_class or SETTINGS not in files or not names_eod:
            if as_any_class:
                for name in ("auto_map", "added_tokens_decoder", "tokenizer_class"):
                    settings.pop(name, None)
            settings = {"tokenizer_class": _ANY_CLASS, **settings, "eos_token": self.eod_text}
            files[SETTINGS] = _json_bytes(settings)
        for name in sorted(files, key=SETTINGS.__eq__):
            write_bytes(folder / name, files[name])
        return folder.name


class SlowTokenizer:
    """A transformers tokenizer without a `tokenizers` backend."""

    adds_special = True

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.eod: int | None = wrapped.eos_token_id
        self.bos: int | None = wrapped.bos_token_id
        self.start_text: str | None = wrapped.bos_token or wrapped.eos_token
        self.vocab_size = max(wrapped.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        return list(self.wrapped.encode(text, add_special_tokens=False))

    def encode_added(self, text: str) -> list[int]:
        """Encode a text with the special tokens that the tokenizer adds."""
        return list(self.wrapped.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.wrapped.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> str:
        self.wrapped.save_pretrained(str(folder))
        return folder.name


Tokenizer: TypeAlias = ByteTokenizer | FastTokenizer | SlowTokenizer


def document_start(tokenizer: Tokenizer) -> list[int]:
    """The tokens before a document: the end of the previous document, or a line break.

    Raises:
        DataError: the tokenizer has neither.
    """
    start = [tokenizer.eod] if tokenizer.eod is not None else tokenizer.encode("\n")
    if not start:
        raise DataError(
            "an empty prompt has no tokens",
            why="the tokenizer has no end-of-document token and none for a line break",
            fix=(
                "give a prompt with text, "
                "or name an eos_token of the vocabulary in tokenizer_config.json"
            ),
        )
    return start


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer by name; the docstring of this module lists the kinds of names.

    Raises:
        DataError: no tokenizer of that name can be loaded.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return _load_fast(file)
    vocab_file, comma, merge_file = name.partition(",")
    if comma:
        return _load_gpt2(vocab_file, merge_file)
    loaded = _load_pretrained(str(path) if path.is_dir() else name)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        return SlowTokenizer(loaded)
    with TemporaryDirectory(prefix="nanotrain-tokenizer-") as saved:
        loaded.save_pretrained(saved)
        files = _read_files(Path(saved))
        if path.is_dir():
            files |= _read_files(path)
    return FastTokenizer(backend, eod_text=loaded.eos_token, bos_text=loaded.bos_token, files=files)


def load_with_files(name: str) -> FastTokenizer | SlowTokenizer:
    """Load a tokenizer whose `save` writes all files: bytes too, as a byte-level BPE."""
    loaded = load_tokenizer(name)
    return loaded.as_fast() if isinstance(loaded, ByteTokenizer) else loaded


def is_local(name: str) -> bool:
    """Whether a tokenizer's name stands for bytes or local files, not for a repository on the hub.

    >>> is_local("bytes"), is_local("gpt2")
    (True, False)
    """
    return name == "bytes" or all(Path(part).exists() for part in name.split(","))


def _load_gpt2(vocab_file: str, merge_file: str) -> FastTokenizer:
    try:
        files = {
            "vocab.json": read_file(Path(vocab_file), most=MAX_TOKENIZER_BYTES),
            "merges.txt": read_file(Path(merge_file), most=MAX_TOKENIZER_BYTES),
        }
        backend = _byte_level(tokenizers.models.BPE.from_file(vocab_file, merge_file))
    except Exception as error:  # the library raises bare Exception
        fix = "name GPT-2's two files with --vocab-file and --merge-file"
        raise DataError(
            f"{vocab_file} and {merge_file} are no tokenizer", why=str(error), fix=fix
        ) from None
    special = [name for name in _EOD_NAMES if backend.token_to_id(name) is not None]
    backend.add_special_tokens(special)
    return FastTokenizer(backend, files=files)


def _byte_level(model: tokenizers.models.BPE) -> tokenizers.Tokenizer:
    """GPT-2's tokenizer with a model."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _load_fast(file: Path) -> FastTokenizer:
    names = TOKENIZER_FILES if file.name == VOCABULARY else (SETTINGS,)
    files = _read_files(file.parent, names)
    try:
        settings = object_of(parse_json(files.get(SETTINGS, b"{}"), allow_nan=True), "it")
        eod_text = _named_token(settings, "eos_token")
        bos_text = _named_token(settings, "bos_token")
    except (ValueError, TypeError, KeyError) as error:
        what = f"{file.with_name(SETTINGS)} cannot be read"
        raise DataError(what, why=str(error), fix="correct or remove it") from None
    try:
        content = read_file(file, most=MAX_TOKENIZER_BYTES)
        backend = tokenizers.Tokenizer.from_buffer(content)
        backend.encode_special_tokens = settings.get("split_special_tokens") is True
        files = {**files, VOCABULARY: content}
        tokenizer = FastTokenizer(backend, eod_text=eod_text, bos_text=bos_text, files=files)
        # a damaged file may load and fail at the first text
        tokenizer.decode(tokenizer.encode("a b"))
    # the library raises bare Exception, and its panics are no Exception
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise DataError(
            f"{file} is no tokenizer",
            why=str(error),
            fix="give a tokenizer.json that `tokenizers` saved",
        ) from None
    return tokenizer


def _read_files(folder: Path, names: Sequence[str] = TOKENIZER_FILES) -> dict[str, bytes]:
    """The contents of a tokenizer's files; tokenizer.json is read where it is parsed.

    Raises:
        DataError: one of them cannot be read, or is a link out of the folder, whose target would be
            copied.
    """
    files = {}
    for name in names:
        path = folder / name
        if name == VOCABULARY or not os.path.lexists(path):
            continue
        try:
            _check_link(path)
            files[name] = read_file(path, most=MAX_TOKENIZER_BYTES)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read", why=unreadable(error), fix="correct or remove it"
            ) from None
    return files


def _check_link(path: Path) -> None:
    """Check that a file is no link out of its folder, except to the blobs of the hub's cache."""
    target = path.resolve()
    if target.parent.name != "blobs" and not target.is_relative_to(path.parent.resolve()):
        raise ValueError(
            f"it is a link to {target}, and runs and exports copy the files of their tokenizer"
        )


def _named_token(settings: Mapping[str, Any], name: str) -> str | None:
    """The text of a token that a tokenizer_config.json names; None if it names none."""
    token = settings.get(name)
    if isinstance(token, dict):
        token = token["content"]
    return None if token is None else text_of(token, name)


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _load_pretrained(name: str) -> Any:
    """Load a transformers tokenizer by name or folder; never runs code from the repository."""
    is_folder = Path(name).is_dir()
    if not is_folder:
        go_offline_if_unreachable()
    from transformers import AutoTokenizer

    try:
        # False, not None: None asks on the terminal, and "y" would run the repository's code.
        return AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, local_files_only=is_folder
        )
    # OSError, ValueError, ImportError, KeyError: depends on the repository
    except Exception as error:
        what = "is no tokenizer.json or folder here"
        if is_folder:
            what = "is a folder without tokenizer.json"
        raise DataError(
            f"the tokenizer {name} cannot be loaded",
            why=f"it {what}, and Hugging Face reports: {first_line(error)}",
            fix=(
                "without a network give a folder with a tokenizer.json, 'bytes', "
                "or in prepare bpe:8192"
            ),
        ) from None


def go_offline_if_unreachable() -> None:
    """Switch the hub client to its cache if the hub does not accept a connection.

    The client itself would try five times, half a minute (measured), before it reports that there
    is no network.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return
    hub = urlsplit(constants.ENDPOINT)
    address = (hub.hostname or "", hub.port or 443)
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
