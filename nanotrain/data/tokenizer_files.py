"""The files of a tokenizer in a Hugging Face folder, and the settings among them."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanotrain.errors import DataError
from nanotrain.untrusted import (
    MAX_TOKENIZER_BYTES,
    object_of,
    parse_json,
    read_file,
    text_of,
    unreadable,
)

VOCABULARY, SETTINGS = "tokenizer.json", "tokenizer_config.json"
# entry of the settings that `save` writes: SHA-256 of the tokenizer.json, the whole tokenizer
HASH = "nanotrainsha256"
TEMPLATE_FILE, GENERATION_FILE = "chat_template.jinja", "generation_config.json"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"  # of conversations with tools
# files whose tokens are in the tokenizer.json that `save` writes
MERGED_FILES = ("special_tokens_map.json", "added_tokens.json")
# vocabulary files of a Hugging Face folder; one of them is enough
VOCABULARY_FILES = (
    VOCABULARY,
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
# Files of a tokenizer in a Hugging Face folder, and the settings of generation, which name its
# tokens.
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    TEMPLATE_FILE,
    TOOL_TEMPLATE_FILE,
    GENERATION_FILE,
)


def read_settings(files: Mapping[str, bytes], file: Path) -> dict[str, Any]:
    """The entries of a tokenizer_config.json; {} without one."""
    try:
        settings = object_of(parse_json(files.get(SETTINGS, b"{}"), allow_nan=True), "it")
        for name in ("eos_token", "bos_token"):
            named_token(settings, name)
    except (ValueError, TypeError, KeyError) as error:
        what = f"{file} cannot be read"
        raise DataError(what, why=str(error), fix="correct or remove it") from None
    return settings


def read_files(folder: Path, names: Sequence[str] = TOKENIZER_FILES) -> dict[str, bytes]:
    """The contents of a tokenizer's files.

    Raises:
        DataError: one of them cannot be read, or is a link out of the folder, whose target would be
            copied.
    """
    files = {}
    for name in names:
        path = folder / name
        if not os.path.lexists(path):
            continue
        try:
            if name != VOCABULARY:  # it is written again, not copied
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


def named_token(settings: Mapping[str, Any], name: str) -> str | None:
    """The text of a token that a tokenizer_config.json names; None if it names none."""
    token = settings.get(name)
    if isinstance(token, dict):
        token = token["content"]
    return None if token is None else text_of(token, name)


def sha256(content: bytes) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """An object as the content of a JSON file."""
    return (json.dumps(value, indent=2) + "\n").encode()
