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
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanotrain.data.corpus_info import recorded_tokenizer
from nanotrain.data.token_format import prefix_of
from nanotrain.data.tokenizer import FastTokenizer, is_local, load_with_files
from nanotrain.data.tokenizer_files import TOKENIZER_FILES, VOCABULARY
from nanotrain.errors import ConfigError, DataError
from nanotrain.paths import path_or_address
from nanotrain.untrusted import MAX_TOKENIZER_BYTES, parse_json, read_file

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
                why=f"one id stands for different texts in {tokenizer} and {other}",
                fix=f"prepare one of them again, for example {prefix} with --tokenizer {tokenizer}",
            )


def require_tokenizer_of(model: str | None, source: str) -> None:
    """Check that the token files that a model is evaluated on have its tokenizer.

    Args:
        model: the tokenizer of the model, as `load_tokenizer` takes it; None if unknown.
        source: prefix of the token files; a text has no tokenizer.

    Raises:
        ConfigError: they have another tokenizer.
    """
    corpus = recorded_tokenizer(path_or_address(prefix_of(source)))
    if model is not None and corpus is not None and is_same_tokenizer(model, corpus) is False:
        raise ConfigError(
            f"{source} was prepared with another tokenizer than the model's",
            why=f"one id stands for different texts in {corpus} and {model}",
            fix=f"evaluate on the text itself, or prepare it with --tokenizer {model}",
        )


def require_run_tokenizer(folder: Path, tokenizer: str | None) -> None:
    """Check that training goes on with the tokenizer in its run folder.

    Args:
        folder: tokenizer folder of the run; it may not exist.
        tokenizer: tokenizer of the data, as `load_tokenizer` takes it; None if unknown.

    Raises:
        ConfigError: the tokenizer of the data is another one.
    """
    if tokenizer is None or not (folder / VOCABULARY).is_file():
        return
    if is_same_tokenizer(str(folder), tokenizer) is False:
        raise ConfigError(
            f"the data has another tokenizer than the run in {folder.parent}",
            why=f"one id stands for different texts in {tokenizer} and {folder}",
            fix=f"prepare the data with --tokenizer {folder}, or train in another folder with "
            "--run-dir",
        )


def definition_hash(folder: Path) -> str | None:
    """The SHA-256 of the tokenizer.json of a folder; None without one."""
    try:
        content = read_file(folder / VOCABULARY, most=MAX_TOKENIZER_BYTES)
    except (OSError, ValueError):
        return None
    return hashlib.sha256(content).hexdigest()


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
    if not (is_local(first) and is_local(second)):
        return None
    if _is_same_copy(first, second):  # Gemma 3's takes a second to parse
        return True
    try:
        first_parts = _definition(first)
        second_parts = _definition(second)
    except DataError:
        return None  # reported where it is loaded
    return all(first_parts.get(part) == second_parts.get(part) for part in _PARTS)


def _is_same_copy(first: str, second: str) -> bool:
    """Whether two folders have the same files that determine the ids."""
    if not (Path(first).is_dir() and Path(second).is_dir()):
        return False
    return _contents(Path(first)) == _contents(Path(second))


def _contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder that determine the ids of its tokenizer, without unreadable ones."""
    contents = {}
    for name in (*TOKENIZER_FILES, "config.json"):
        with suppress(OSError, ValueError):
            contents[name] = read_file(folder / name, most=MAX_TOKENIZER_BYTES)
    return contents


def _definition(name: str) -> dict[str, Any]:
    """The parts of a tokenizer as `load_tokenizer` loads it.

    Raises:
        DataError: it cannot be loaded.
    """
    loaded = load_with_files(name)
    if not isinstance(loaded, FastTokenizer):
        raise DataError(f"{name} has no definition", why="it is a class of transformers alone")
    definition: dict[str, Any] = parse_json(loaded.backend.to_str())
    return definition
