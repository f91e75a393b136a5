"""How a corpus was prepared: `PREFIX.nanotrain.json`, written beside its `.bin/.idx` pair.

The tokenizer named there is "bytes" or a folder beside the pair. A token id means a different text
in every vocabulary: a blend of two would train on noise, and validation on another vocabulary would
measure nothing, so corpora of different tokenizers are refused. Corpora without a recorded
tokenizer, such as Megatron-LM's, are not checked.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tokenizers

from nanotrain.data.remote import local_folder, open_file
from nanotrain.data.token_format import prefix_of
from nanotrain.data.tokenizer import VOCABULARY, ByteTokenizer
from nanotrain.errors import ConfigError, DataError
from nanotrain.paths import path_or_address
from nanotrain.runs.files import write_text
from nanotrain.untrusted import (
    MAX_TOKENIZER_BYTES,
    object_of,
    parse_json,
    read_file,
    text_of,
    whole_number,
)


@dataclass(frozen=True)
class CorpusInfo:
    """The contents of `PREFIX.nanotrain.json` (`PREFIX.json` may be an input file)."""

    # "bytes", or the name of a folder beside the pair; None if unknown
    tokenizer: str | None = None
    vocab_size: int = 0  # one more than the largest id of that tokenizer
    eod: int | None = None  # the end-of-document token
    documents: int = 0  # number of documents
    tokens: int = 0  # number of tokens
    plan: str = ""  # hash of inputs and options
    inputs: dict[str, str] = field(default_factory=dict)  # SHA-256 of every input file, by its path
    # of its definition; empty for bytes and where transformers' classes are the tokenizer
    tokenizer_sha256: str = ""


# of the fields that are no numbers
CHECKS = {"tokenizer": text_of, "plan": text_of, "tokenizer_sha256": text_of, "inputs": object_of}


def tokenizer_path(prefix: Path) -> Path:
    """The folder beside a pair that holds the tokenizer."""
    return prefix.with_name(prefix.name + ".tokenizer")


def read_info(prefix: Path) -> CorpusInfo:
    """Read the info of a corpus; an empty one if there is none, as beside Megatron-LM's own files.

    Raises:
        DataError: the file is damaged.
    """
    path = _info_path(prefix)
    file = open_file(path)
    if file is None:
        return CorpusInfo()
    try:
        info = CorpusInfo(**object_of(parse_json(read_file(file.local)), "it"))
        for name, value in asdict(info).items():
            if value is not None or name not in ("tokenizer", "eod"):
                CHECKS[name](value, name) if name in CHECKS else whole_number(value, name)
        return info
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read",
            why=str(error),
            fix="remove it and name the tokenizer with --tokenizer-model, or prepare the corpus again",
        ) from None


def write_info(prefix: Path, info: CorpusInfo) -> None:
    """Write the info of a corpus, atomically."""
    write_text(_info_path(prefix), json.dumps(asdict(info), indent=2) + "\n")


def recorded_tokenizer(prefix: Path | str) -> str | None:
    """The tokenizer a corpus was prepared with, as `load_tokenizer` takes it; None if unknown."""
    prefix = prefix if isinstance(prefix, Path) else Path(prefix)
    name, folder = read_info(prefix).tokenizer, tokenizer_path(prefix)
    return str(local_folder(folder)) if name == folder.name else name


def _info_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".nanotrain.json")


# parts of tokenizer.json that determine the ids
_PARTS = ("model", "added_tokens", "normalizer", "pre_tokenizer")


def require_same_tokenizer(prefixes: Iterable[Path]) -> None:
    """Check the recorded tokenizers of all corpora of a run.

    Raises:
        ConfigError: two of them differ.
    """
    known = {prefix: tokenizer for prefix in prefixes if (tokenizer := recorded_tokenizer(prefix))}
    if not known:
        return
    (first, tokenizer), *others = known.items()
    for prefix, other in others:
        if is_same_tokenizer(tokenizer, other) is False:
            raise ConfigError(
                f"{first} and {prefix} were prepared with different tokenizers",
                why=f"those are {tokenizer} and {other}, in which the same id is different text",
                fix=f"prepare one of them again, for example {prefix} with --tokenizer {tokenizer}",
            )


def require_tokenizer_of(model: str | None, source: str) -> None:
    """Check that the token files that a model is evaluated on have its tokenizer.

    Args:
        model: the tokenizer of the model, as `load_tokenizer` takes it; None if unknown.
        source: prefix of the token files; a text has no tokenizer.

    Raises:
        ConfigError: they have another one.
    """
    corpus = recorded_tokenizer(path_or_address(prefix_of(source)))
    if model is not None and corpus is not None and is_same_tokenizer(model, corpus) is False:
        raise ConfigError(
            f"{source} was prepared with another tokenizer than the model's",
            why=f"those are {corpus} and {model}, in which the same id is different text",
            fix=f"evaluate on the text itself, or prepare it with --tokenizer {model}",
        )


def is_same_tokenizer(first: str, second: str) -> bool | None:
    """Whether two tokenizers, as `load_tokenizer` takes them, give the same ids; None if one of
    them is unknown.
    """
    contents = [_content(first), _content(second)]
    if first != second and None in contents:
        return None
    if contents[0] == contents[1]:  # Gemma 3's takes a second to parse
        return True
    try:
        parsed = [
            object_of(parse_json(_normalized(content)), "it")
            for content in contents
            if content is not None
        ]
    except ValueError:
        return None  # reported where it is loaded
    return all(parsed[0].get(part) == parsed[1].get(part) for part in _PARTS)


def _content(tokenizer: str) -> bytes | None:
    """The definition of a tokenizer; None if it is unknown or cannot be read."""
    if tokenizer == "bytes":
        return ByteTokenizer().as_fast().backend.to_str().encode()
    path = Path(tokenizer)
    try:
        return read_file(path if path.is_file() else path / VOCABULARY, most=MAX_TOKENIZER_BYTES)
    except (OSError, ValueError):
        return None


def _normalized(content: bytes) -> bytes:
    """A tokenizer.json as the installed library writes it: older ones wrote merges in another form."""
    try:
        return tokenizers.Tokenizer.from_buffer(content).to_str().encode()
    # the library raises bare Exception, and its panics are no Exception
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return content
