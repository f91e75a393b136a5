"""Checks that token files and models have the same tokenizer.

A token id means a different text in every vocabulary: a blend of two would train on noise, and
validation on another vocabulary would measure nothing, so corpora of different tokenizers are
refused. Corpora without a recorded tokenizer, such as Megatron-LM's, are not checked.

    require_same_tokenizer   the corpora of a run
    require_tokenizer_of     a model and the token files that it is evaluated on
    require_run_tokenizer    a run folder and the data that training in it goes on with
    require_recorded         a run folder and a checkpoint in it
    is_same_tokenizer        two tokenizers by name
    definition_hash          the hash that checkpoints record
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from nanotrain.data.corpus_info import recorded_tokenizer
from nanotrain.data.token_format import prefix_of
from nanotrain.data.tokenizer import VOCABULARY, ByteTokenizer
from nanotrain.errors import ConfigError, DataError
from nanotrain.paths import path_or_address
from nanotrain.untrusted import MAX_TOKENIZER_BYTES, object_of, parse_json, read_file

# parts of tokenizer.json that determine the ids
_PARTS = ("model", "added_tokens", "normalizer", "pre_tokenizer")


def require_same_tokenizer(prefixes: Iterable[Path]) -> None:
    """Check the recorded tokenizers of all corpora of a run.

    Raises:
        ConfigError: two of them differ.
    """
    known = {}
    for prefix in prefixes:
        tokenizer = recorded_tokenizer(prefix)
        if tokenizer:
            known[prefix] = tokenizer
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


def require_run_tokenizer(folder: Path, tokenizer: str | None) -> None:
    """Check that training goes on with the tokenizer in its run folder.

    Args:
        folder: tokenizer folder of the run; it may not exist.
        tokenizer: tokenizer of the data, as `load_tokenizer` takes it; None if unknown.

    Raises:
        ConfigError: it is another one.
    """
    if tokenizer is None or not (folder / VOCABULARY).is_file():
        return
    if is_same_tokenizer(str(folder), tokenizer) is False:
        raise ConfigError(
            f"the data has another tokenizer than the run in {folder.parent}",
            why=f"those are {tokenizer} and {folder}, in which the same id is different text",
            fix=f"prepare the data with --tokenizer {folder}, or train in another folder with "
            "--run-dir",
        )


def definition_hash(folder: Path) -> str | None:
    """The SHA-256 of the tokenizer.json of a folder; None without one."""
    content = _read_definition(str(folder))
    return None if content is None else hashlib.sha256(content).hexdigest()


def require_recorded(folder: Path, sha256: object, *, checkpoint: Path) -> None:
    """Check that the tokenizer of a run folder is the one that a checkpoint was trained with.

    Args:
        folder: tokenizer folder of the run.
        sha256: `definition_hash` in the checkpoint; None in checkpoints of older versions.
        checkpoint: step folder, for the error.

    Raises:
        DataError: it is another one.
    """
    now = definition_hash(folder)
    if sha256 is None or now is None or sha256 == now:
        return
    raise DataError(
        f"{folder} is not the tokenizer that {checkpoint} was trained with",
        why=f"its tokenizer.json has SHA-256 {now[:12]}..., the checkpoint has {str(sha256)[:12]}",
        fix="put that tokenizer back, or name one with --tokenizer",
    )


def is_same_tokenizer(first: str, second: str) -> bool | None:
    """Whether two tokenizers, named as for `load_tokenizer`, give the same ids; None if unknown."""
    if first == second:
        return True
    first_content = _read_definition(first)
    second_content = _read_definition(second)
    if first_content is None or second_content is None:
        return None
    if first_content == second_content:  # Gemma 3's takes a second to parse
        return True
    try:
        first_parts = object_of(parse_json(_normalized(first_content)), "it")
        second_parts = object_of(parse_json(_normalized(second_content)), "it")
    except ValueError:
        return None  # reported where it is loaded
    return all(first_parts.get(part) == second_parts.get(part) for part in _PARTS)


def _read_definition(tokenizer: str) -> bytes | None:
    """The definition of a tokenizer; None if it is unknown or cannot be read."""
    if tokenizer == "bytes":
        return ByteTokenizer().as_fast().backend.to_str().encode()
    path = Path(tokenizer)
    file = path if path.is_file() else path / VOCABULARY
    try:
        return read_file(file, most=MAX_TOKENIZER_BYTES)
    except (OSError, ValueError):
        return None


def _normalized(content: bytes) -> bytes:
    """A tokenizer.json as the installed library writes it: older ones wrote merges differently."""
    try:
        return tokenizers.Tokenizer.from_buffer(content).to_str().encode()
    # the library raises bare Exception, and its panics are no Exception
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return content
