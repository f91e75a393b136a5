"""Files that travel with the weights: tokenizer, generation_config.json, and config.json of the model's origin.

The origin of a model is the Hugging Face folder that its weights were imported from. Where the exported model is the
one that this folder's config.json describes, config.json is written as it is there, with entries that nanotrain does
not read; so import and export are the identity. Another model gets its own config.json with the special tokens of the
origin.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from nanotrain.config.model import ModelConfig
from nanotrain.config.schema import value_of, with_values
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.canonical import canonical, free_keys
from nanotrain.interop.hf.families import model_from_hf, read_config
from nanotrain.interop.hf.tables import read_tables
from nanotrain.runs.files import write_text
from nanotrain.untrusted import MAX_TOKENIZER_BYTES, object_of, parse_json, read_file

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
TOKENIZER_FILES: tuple[str, ...] = tuple(read_tables()["tokenizer_files"])
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Entries that do not hold for what is exported: the weights are dequantized, and no code of the folder is copied.
_NOT_EXPORTED = ("quantization_config", "auto_map")


@dataclass(frozen=True)
class Companions:
    """Where files beside the weights are copied from.

    Attributes:
        tokenizer: a tokenizer.json or a folder with tokenizer files; None for those of the origin.
        origin: the Hugging Face folder that the model was imported from, if it is known and still there.
        is_retokenized: the model was trained with a tokenizer that is not the origin's and not a local file, so that
            none is copied.
    """

    tokenizer: Path | None = None
    origin: Path | None = None
    is_retokenized: bool = False

    @property
    def tokenizer_source(self) -> Path | None:
        """The file or folder from which tokenizer files are copied; None for none."""
        if self.tokenizer is not None or self.origin is None or self.is_retokenized:
            return self.tokenizer
        return self.origin if _tokenizer_files(self.origin) else None

    @cached_property
    def has_own_tokenizer(self) -> bool:
        """Whether the special tokens of the origin are those of the tokenizer."""
        source = self.tokenizer_source
        if self.origin is None or self.is_retokenized:
            return False
        return source is None or source.resolve() == self.origin.resolve() or is_same_tokenizer(source, self.origin)

    @cached_property
    def origin_config(self) -> dict[str, Any]:
        """config.json of the origin; {} where the folder is gone or is no longer a model."""
        try:
            return {} if self.origin is None else read_config(self.origin)
        except HuggingFaceError:
            return {}

    def config(self, model_config: ModelConfig, written: Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
        """The config.json of an export without its dtype, and the file that already is this one.

        Args:
            model_config: configuration of the exported model.
            written: the entries that nanotrain writes.
        """
        raw = self.origin_config
        if self.origin is None:
            return dict(written), None
        if raw.get("model_type") == written["model_type"] and _describes(self.origin, model_config):
            left_out = _NOT_EXPORTED if self.has_own_tokenizer else (*_NOT_EXPORTED, *SPECIAL_TOKENS)
            kept = {key: value for key, value in raw.items() if key not in left_out}
            for name in ("dtype", "torch_dtype"):
                if name in kept or (name == "torch_dtype" and "dtype" not in kept):
                    kept[name] = written["torch_dtype"]
            return kept, self.origin / CONFIG_FILE if kept == raw else None
        tokens = {name: raw[name] for name in SPECIAL_TOKENS if name in raw}
        return {**written, **(tokens if self.has_own_tokenizer else {})}, None

    def copy_tokenizer(self, folder: Path) -> dict[str, Any]:
        """Copy tokenizer files; returns the entries of config.json with the ids of another tokenizer's special tokens.

        Raises:
            HuggingFaceError: there are none, or they cannot be read.
        """
        source = self.tokenizer_source
        if source is None:
            return {}
        files = _tokenizer_files(source)
        if not files:
            why = f"none of {', '.join(TOKENIZER_FILES)} exists"
            fix = "give a tokenizer.json or its folder"
            raise HuggingFaceError(f"{source} contains no tokenizer", why=why, fix=fix)
        for file in files:
            shutil.copyfile(file, folder / ("tokenizer.json" if source.is_file() else file.name))
        return {} if self.has_own_tokenizer else _special_tokens(folder, source)

    def write_generation_config(self, folder: Path, tokens: Mapping[str, Any]) -> None:
        """Copy generation_config.json of the tokenizer's folder, else of an origin with this tokenizer.

        Without either one is written from `tokens`, the ids of the special tokens.
        """
        for source in (self.tokenizer, self.origin if self.has_own_tokenizer else None):
            if source is not None and (source / GENERATION_FILE).is_file():
                shutil.copyfile(source / GENERATION_FILE, folder / GENERATION_FILE)
                return
        if tokens:
            write_text(folder / GENERATION_FILE, json.dumps(dict(tokens), indent=2, sort_keys=True) + "\n")


def is_same_tokenizer(first: Path, second: Path) -> bool:
    """Whether both encode alike: tokenizer.json is the same except for formatting and what nanotrain does not use."""
    contents = []
    for source in (first, second):
        try:
            file = source if source.is_file() else source / "tokenizer.json"
            tokenizer = tokenizers.Tokenizer.from_buffer(read_file(file, most=MAX_TOKENIZER_BYTES))
        except Exception:  # tokenizers raises no narrower class
            return False
        tokenizer.no_truncation()
        tokenizer.no_padding()
        contents.append(tokenizer.to_str())
    return contents[0] == contents[1]


def _tokenizer_files(source: Path) -> list[Path]:
    return [source] if source.is_file() else [source / name for name in TOKENIZER_FILES if (source / name).exists()]


def _describes(folder: Path, model_config: ModelConfig) -> bool:
    """Whether config.json of the folder describes the model; fields that do not depend on the weights may differ."""
    try:
        described = model_from_hf(folder)
    except HuggingFaceError:
        return False
    free = {key: value_of(described, key) for key in free_keys(described)}
    return canonical(with_values(model_config, free)) == canonical(described)


def _special_tokens(folder: Path, source: Path) -> dict[str, Any]:
    settings, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not (settings.exists() and vocabulary.exists()):
        return {}
    try:
        added = parse_json(vocabulary.read_bytes(), allow_nan=True).get("added_tokens", ())
        ids = {token["content"]: token["id"] for token in added}
        names = object_of(parse_json(settings.read_bytes(), allow_nan=True), settings.name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise HuggingFaceError(f"{source} contains no tokenizer", why=why, fix="give another --tokenizer") from None
    entries: dict[str, Any] = {}
    for role in ("bos", "eos"):
        token = names.get(f"{role}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content in ids:
            entries[f"{role}_token_id"] = ids[content]
    return entries
