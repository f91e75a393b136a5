"""Text to token ids and back.

    "bytes"                               one token per byte, and one end-of-document token
    a folder, a Hugging Face name         as transformers' AutoTokenizer loads it (pretrained.py)
    a folder that `save` wrote            loaded by `tokenizers` alone, in milliseconds
    tokenizer.json of another name        the same
    vocab.json,merges.txt                 GPT-2's two files, by `tokenizers`

Encoding adds no special tokens; `prepare` ends each document with `eod`. BPE dropout is off. Every
tokenizer has

    vocab_size        one more than the largest id
    eod               the end-of-document token, None if there is none
    bos               the token that begins a prompt, None if there is none
    adds_special      whether prompts have the special tokens that the tokenizer adds
    notes             what differs from AutoTokenizer for the same files
    encode            text -> ids
    encode_added      text -> ids, with the special tokens that are added (data/prompts.py)
    encode_documents  texts of documents -> ids
    decode            ids -> text, without special tokens
    save              writes a folder and returns its name; "bytes" if there is nothing to write

A special token written in a prompt or task becomes its id, as AutoTokenizer has it. In a document
it stays text, whatever the tokenizer, unless `parse_special` is set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import tokenizers

from nanotrain.data.encoding_budget import within_budget
from nanotrain.data.pretrained import ANY_CLASS, load_pretrained, resolved_settings
from nanotrain.data.tokenizer_files import (
    HASH,
    MERGED_FILES,
    SETTINGS,
    TOKENIZER_FILES,
    VOCABULARY,
    json_bytes,
    named_token,
    read_files,
    read_settings,
    sha256,
)
from nanotrain.errors import DataError
from nanotrain.log import get_logger
from nanotrain.runs.files import write_bytes
from nanotrain.untrusted import (
    MAX_TOKENIZER_BYTES,
    parse_json,
    read_file,
    unreadable,
)

log = get_logger(__name__)

# Usual names of the end-of-document token, for a bare tokenizer.json, which does not name it.
_EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>", "[EOS]", "[SEP]")
Files: TypeAlias = Mapping[str, bytes] | None  # contents of files by name


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
    notes: tuple[str, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def encode_added(self, text: str) -> list[int]:
        """The bytes of the text, to which no special token is added."""
        return self.encode(text)

    def encode_documents(
        self, texts: Sequence[str], *, parse_special: bool = False
    ) -> list[list[int]]:
        """Encode documents; bytes have no special tokens to parse."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode bytes; invalid UTF-8 gives replacement characters."""
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> str:
        """Write nothing: the name is enough to load the tokenizer."""
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
        return FastTokenizer(backend, settings={"split_special_tokens": True})


class FastTokenizer:
    """A tokenizer of the `tokenizers` library.

    Truncation and padding stored in the file are switched off, as AutoTokenizer does. BPE dropout
    is switched off too: it is for training on other tokens in every epoch, and corpora are
    tokenized once.

    Args:
        backend: the tokenizer of the library.
        eod_text: text of the end-of-document token; None for a usual name.
        bos_text: text of the token that begins a prompt; None if there is none.
        files: contents of the files that it was loaded from, by their names in a folder.
        settings: tokenizer_config.json with which the backend's `tokenizer.json` is the whole
            tokenizer.
    """

    adds_special = True

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eod_text: str | None = None,
        bos_text: str | None = None,
        files: Files = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.files = dict(files or {})
        self.settings = {"tokenizer_class": ANY_CLASS, **(settings or {})}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        names = [eod_text] if eod_text is not None else _EOD_NAMES
        self.eod_text = next((name for name in names if name in vocabulary), None)
        self.eod: int | None = None if self.eod_text is None else vocabulary[self.eod_text]
        self.bos: int | None = None if bos_text is None else vocabulary.get(bos_text)
        self.start_text = self.eod_text if self.bos is None else bos_text
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.has_named_eod = eod_text is not None
        self.dropout: float | None = getattr(backend.model, "dropout", None)
        if self.dropout:
            backend.model.dropout = None

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each difference from AutoTokenizer with the same files."""
        notes = []
        if self.dropout:
            notes.append(
                f"BPE dropout {self.dropout:g} of {VOCABULARY} is off: "
                "the same text always has the same tokens"
            )
        if self.eod_text is not None and not self.has_named_eod:
            notes.append(f"no eos_token is named: {self.eod_text}, a usual name, ends documents")
        added = self._added_before_text()
        if added:
            notes.append(
                f"AutoTokenizer adds {added} to a text; "
                "documents are encoded without, and end with the end-of-document token"
            )
        return tuple(notes)

    def _added_before_text(self) -> str:
        """The special tokens that the post-processor adds to a text; "" for none."""
        if not self.backend.num_special_tokens_to_add(is_pair=False):
            return ""
        return " ".join(self.backend.encode("").tokens)

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of the special tokens."""
        added = self.backend.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def encode(self, text: str) -> list[int]:
        """Encode a text on one thread."""
        return self.encode_batch([text])[0]

    def encode_added(self, text: str) -> list[int]:
        """Encode a text with the special tokens that the post-processor adds."""
        return self._encode([text], add_special_tokens=True)[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts on all threads that `tokenizers` may use.

        Raises:
            DataError: a character that the tokenizer neither has nor replaces, or a text that takes
                too much time or memory.
        """
        return self._encode(texts, add_special_tokens=False)

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        encodings = within_budget(
            # `encode` alone would keep the interpreter's lock
            lambda: self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens),
            num_characters=sum(map(len, texts)),
        )
        return [encoding.ids for encoding in encodings]

    def encode_documents(
        self, texts: Sequence[str], *, parse_special: bool = False
    ) -> list[list[int]]:
        """Encode documents, in which special tokens are text unless `parse_special` is set."""
        is_text = self.backend.encode_special_tokens
        self.backend.encode_special_tokens = is_text or not parse_special
        try:
            return self.encode_batch(texts)
        finally:
            self.backend.encode_special_tokens = is_text

    def decode(self, ids: Sequence[int]) -> str:
        texts = within_budget(
            lambda: self.backend.decode_batch([list(ids)], skip_special_tokens=True),
            num_characters=len(ids),
        )
        return str(texts[0])

    def save(self, folder: Path, *, as_published: bool = False) -> str:
        """Write the tokenizer as it encodes here, and the other files it was loaded from.

        Args:
            folder: created if absent; the settings are written last.
            as_published: the files as they were loaded where these say everything, for other
                programs.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = self._published_files() if as_published else self._resolved_files()
        for name in TOKENIZER_FILES:  # of another tokenizer that was in this folder
            if name not in files:
                (folder / name).unlink(missing_ok=True)
        for name in sorted(files, key=SETTINGS.__eq__):
            (folder / name).parent.mkdir(exist_ok=True)
            write_bytes(folder / name, files[name])
        return folder.name

    def _resolved_files(self) -> dict[str, bytes]:
        """Files from which `tokenizers` alone, and AutoTokenizer, load this tokenizer."""
        files = {name: text for name, text in self.files.items() if name not in MERGED_FILES}
        content = self.backend.to_str(pretty=True).encode()
        settings = {**self.settings, "eos_token": self.eod_text, HASH: sha256(content)}
        return {**files, VOCABULARY: content, SETTINGS: json_bytes(settings)}

    def _published_files(self) -> dict[str, bytes]:
        """The files that it was loaded from, with an end-of-document token if they name none."""
        if SETTINGS not in self.files or self.dropout:
            return self._resolved_files()
        files = {VOCABULARY: self.backend.to_str(pretty=True).encode(), **self.files}
        if self.eod_text is not None and not self.has_named_eod:
            settings = parse_json(self.files[SETTINGS], allow_nan=True)
            files[SETTINGS] = json_bytes({**settings, "eos_token": self.eod_text})
        return files


class SlowTokenizer:
    """A transformers tokenizer without a `tokenizers` backend."""

    adds_special = True
    notes: tuple[str, ...] = ()

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.eod: int | None = wrapped.eos_token_id
        self.bos: int | None = wrapped.bos_token_id
        self.start_text: str | None = wrapped.bos_token or wrapped.eos_token
        self.vocab_size = max(wrapped.get_vocab().values()) + 1

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of the special tokens."""
        return tuple(self.wrapped.all_special_tokens)

    def encode(self, text: str) -> list[int]:
        return list(self.wrapped.encode(text, add_special_tokens=False))

    def encode_added(self, text: str) -> list[int]:
        """Encode a text with the special tokens that the tokenizer adds."""
        return list(self.wrapped.encode(text))

    def encode_documents(
        self, texts: Sequence[str], *, parse_special: bool = False
    ) -> list[list[int]]:
        """Encode documents, in which special tokens are text unless `parse_special` is set."""
        is_text = self.wrapped.split_special_tokens
        self.wrapped.split_special_tokens = is_text or not parse_special
        try:
            return [self.encode(text) for text in texts]
        finally:
            self.wrapped.split_special_tokens = is_text

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.wrapped.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path, *, as_published: bool = False) -> str:
        self.wrapped.save_pretrained(str(folder))
        return folder.name


Tokenizer: TypeAlias = ByteTokenizer | FastTokenizer | SlowTokenizer


def document_start(tokenizer: Tokenizer) -> list[int]:
    """The tokens that stand for an empty prompt: the end of a document before it, or a line break.

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
    tokenizer = _load(name)
    if isinstance(tokenizer, FastTokenizer) and tokenizer.dropout:
        _log_once(f"{name}: {tokenizer.notes[0]}")
    return tokenizer


@cache
def _log_once(line: str) -> None:
    log.info("%s", line)


def _load(name: str) -> Tokenizer:
    """Load a tokenizer by "bytes", folder, file, GPT-2's two files, or name on the hub."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    if path.name == VOCABULARY and path.is_file():
        path = path.parent  # the files beside it belong to it
    if path.is_dir():
        return _load_folder(path)
    if path.is_file():
        return _load_file(path)
    vocab_file, comma, merge_file = name.partition(",")
    if comma:
        return _load_gpt2(vocab_file, merge_file)
    loaded = load_pretrained(name)
    with TemporaryDirectory(prefix="nanotrain-tokenizer-") as saved:
        loaded.save_pretrained(saved)
        return _wrap_pretrained(loaded, source=name, files=read_files(Path(saved)))


def _load_folder(folder: Path) -> FastTokenizer | SlowTokenizer:
    """Load a folder: by transformers, or tokenizer.json alone if nanotrain wrote it."""
    files = read_files(folder)
    settings = read_settings(files, folder / SETTINGS)
    definition = files.get(VOCABULARY)
    if definition is not None and settings.get(HASH) == sha256(definition):
        return _from_definition(files, settings=settings, source=folder / VOCABULARY)
    try:
        return _wrap_pretrained(load_pretrained(str(folder)), source=str(folder), files=files)
    except DataError:
        if definition is None:
            raise
        bare = _from_definition(files, settings=settings, source=folder / VOCABULARY)
        if "auto_map" not in settings:
            raise
        log.info(
            "%s asks for code of its own, which is not run: the tokenizer is tokenizer.json alone",
            folder,
        )
        return bare


def _wrap_pretrained(
    loaded: Any, *, source: str, files: Mapping[str, bytes]
) -> FastTokenizer | SlowTokenizer:
    """A tokenizer of transformers; its `tokenizers` backend alone where it has one."""
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        return SlowTokenizer(loaded)
    settings = parse_json(files.get(SETTINGS, b"{}"), allow_nan=True)
    tokenizer = FastTokenizer(
        backend,
        eod_text=loaded.eos_token,
        bos_text=loaded.bos_token,
        files=files,
        settings=resolved_settings(loaded, settings),
    )
    _require_encodes(tokenizer, source)
    return tokenizer


def _load_file(file: Path) -> FastTokenizer:
    """A tokenizer.json of another name."""
    try:
        content = read_file(file, most=MAX_TOKENIZER_BYTES)
    except (OSError, ValueError) as error:
        raise _no_tokenizer(file, unreadable(error)) from None
    return _from_definition({VOCABULARY: content}, settings={}, source=file)


def _from_definition(
    files: Mapping[str, bytes], *, settings: Mapping[str, Any], source: Path
) -> FastTokenizer:
    """The tokenizer of a tokenizer.json alone."""
    try:
        backend = tokenizers.Tokenizer.from_buffer(files[VOCABULARY])
        backend.encode_special_tokens = settings.get("split_special_tokens") is True
        tokenizer = FastTokenizer(
            backend,
            eod_text=named_token(settings, "eos_token"),
            bos_text=named_token(settings, "bos_token"),
            files=files,
            settings=settings,
        )
    # the library raises bare Exception, and its panics are no Exception
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise _no_tokenizer(source, str(error)) from None
    _require_encodes(tokenizer, source)
    return tokenizer


def _require_encodes(tokenizer: FastTokenizer, source: Path | str) -> None:
    """Check that a tokenizer encodes a text: a damaged file may load and fail at the first one."""
    try:
        tokenizer.decode(tokenizer.encode("a b"))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise _no_tokenizer(source, str(error)) from None


def _no_tokenizer(source: Path | str, why: str) -> DataError:
    return DataError(
        f"{source} is no tokenizer", why=why, fix="give a tokenizer.json that `tokenizers` saved"
    )


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
    """Load GPT-2's vocabulary and merges as a byte-level BPE tokenizer."""
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
