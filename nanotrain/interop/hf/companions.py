"""Files that travel with the weights: tokenizer, generation_config.json, and config.json of the
model's origin.

The origin of a model is the Hugging Face folder that its weights were imported from. Where the
exported model is the one that this folder's config.json describes, config.json is written as it is
there, with entries that nanotrain does not read; so import and export are the identity. Another
model gets its own config.json with the special tokens of the origin.

A tokenizer is exported only as transformers' AutoTokenizer loads it alike: with equal ids, and the
same end-of-document token. AutoTokenizer builds the tokenizers of some families from the vocabulary
alone, whatever else tokenizer.json holds; where that gives other ids, the settings are those of any
class.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nanotrain.config.model import ModelConfig
from nanotrain.config.schema import value_of, with_values
from nanotrain.data.corpus_info import is_same_tokenizer
from nanotrain.data.tokenizer import (
    VOCABULARY_FILES,
    FastTokenizer,
    SlowTokenizer,
    first_line,
    load_with_files,
)
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.canonical import canonical, free_keys
from nanotrain.interop.hf.families import (
    MAX_CONFIG_BYTES,
    model_from_hf,
    read_config,
    read_full_config,
)
from nanotrain.runs.files import write_bytes, write_text
from nanotrain.untrusted import own_file, read_file

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Entries that do not hold for what is exported: the weights are dequantized, and no code of the
# folder is copied.
_NOT_EXPORTED = ("quantization_config", "auto_map")
# Texts whose ids are compared, beside all special tokens and texts of the whole vocabulary.
_TEXTS = (
    " a|a |  a  b   c|\n|a\n\n b\r\n\tc|I'm we'LL 1234567.8|gr\u00f6\u00dfer e\u0301 \ufb01|\u65e5\u672c\u3002|\u0645"
    "|\u0928 \U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f|\u00a0\u2003\u200b\ufeff|\u2581a <0x0A> \u0120"
)
_IDS_PER_TEXT = 64


@dataclass(frozen=True)
class Companions:
    """Where files beside the weights are copied from.

    Attributes: tokenizer: the tokenizer, as `load_tokenizer` takes it; None for none. origin: the
        Hugging Face folder that the model was imported from, if it is known and still there.
    """

    tokenizer: str | None = None
    origin: Path | None = None

    @cached_property
    def has_own_tokenizer(self) -> bool:
        """Whether the special tokens of the origin are those of the tokenizer."""
        if self.origin is None or self.tokenizer is None:
            return self.origin is not None
        return self.tokenizer == str(self.origin) or bool(
            is_same_tokenizer(self.tokenizer, str(self.origin))
        )

    @cached_property
    def origin_config(self) -> dict[str, Any]:
        """config.json of the origin; {} where the folder is gone or is no longer a model."""
        try:
            return {} if self.origin is None else read_config(self.origin)
        except HuggingFaceError:
            return {}

    def config(
        self, model_config: ModelConfig, written: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Path | None]:
        """The config.json of an export without its dtype, and the file that already is this one.

        Args:
            model_config: configuration of the exported model.
            written: the entries that nanotrain writes.
        """
        raw = self.origin_config
        if self.origin is None:
            return dict(written), None
        if raw.get("model_type") == written["model_type"] and _describes(self.origin, model_config):
            left_out = (
                _NOT_EXPORTED if self.has_own_tokenizer else (*_NOT_EXPORTED, *SPECIAL_TOKENS)
            )
            kept = {key: value for key, value in raw.items() if key not in left_out}
            for name in ("dtype", "torch_dtype"):
                if name in kept or (name == "torch_dtype" and "dtype" not in kept):
                    kept[name] = written["torch_dtype"]
            return kept, self.origin / CONFIG_FILE if kept == read_full_config(
                self.origin
            ) else None
        tokens = {name: raw[name] for name in SPECIAL_TOKENS if name in raw}
        return {**written, **(tokens if self.has_own_tokenizer else {})}, None

    def write_tokenizer(self, folder: Path) -> dict[str, Any]:
        """Write the tokenizer beside config.json; returns the entries of config.json that name its
        special tokens.

        Raises:
            DataError: it cannot be loaded.
            HuggingFaceError: transformers loads another one from its files.
        """
        if self.tokenizer is None:
            return {}
        tokenizer = load_with_files(self.tokenizer)
        tokenizer.save(folder)
        loaded, difference = _load_again(tokenizer, folder)
        if difference and isinstance(tokenizer, FastTokenizer):
            tokenizer.save(folder, as_any_class=True)
            loaded, difference = _load_again(tokenizer, folder)
        if difference:
            raise HuggingFaceError(
                f"transformers' AutoTokenizer does not load {self.tokenizer} as nanotrain does",
                why=difference,
                fix="give another --tokenizer or --family, or --tokenizer none to export the weights alone",
            )
        roles = () if self.has_own_tokenizer else ("bos", "eos")
        return {f"{role}_token_id": getattr(loaded, f"{role}_token_id") for role in roles}

    def write_generation_config(self, folder: Path, tokens: Mapping[str, Any]) -> None:
        """Keep generation_config.json of the tokenizer, else copy that of an origin with this
        tokenizer.

        Without either one is written from `tokens`, the ids of the special tokens.
        """
        target = folder / GENERATION_FILE
        if target.is_file():
            return
        if (
            self.origin is not None
            and self.has_own_tokenizer
            and (source := self.origin / GENERATION_FILE).is_file()
        ):
            try:
                write_bytes(target, read_file(own_file(source), most=MAX_CONFIG_BYTES))
            except ValueError as error:
                raise HuggingFaceError(
                    f"{source} is not copied", why=str(error), fix="remove it"
                ) from None
        elif known := {name: token for name, token in tokens.items() if token is not None}:
            write_text(target, json.dumps(known, indent=2, sort_keys=True) + "\n")


def fullest_tokenizer(name: str | None, origin: Path | None) -> str | None:
    """The tokenizer of a model: its origin's where `name` is a copy of that, which may lack files,
    or unknown.
    """
    if origin is None or not any((origin / file).is_file() for file in VOCABULARY_FILES):
        return name
    return str(origin) if name is None or is_same_tokenizer(name, str(origin)) else name


def _describes(folder: Path, model_config: ModelConfig) -> bool:
    """Whether config.json of the folder describes the model; fields that do not depend on the
    weights may differ.
    """
    try:
        described = model_from_hf(folder)
    except HuggingFaceError:
        return False
    free = {key: value_of(described, key) for key in free_keys(described)}
    return canonical(with_values(model_config, free)) == canonical(described)


def _load_again(tokenizer: FastTokenizer | SlowTokenizer, folder: Path) -> tuple[Any, str]:
    """A saved tokenizer as transformers loads it, and in what it differs; "" if in nothing."""
    from transformers import AutoTokenizer  # takes seconds

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        for text in _texts(tokenizer):
            theirs, ours = loaded.encode(text, add_special_tokens=False), tokenizer.encode(text)
            if theirs != ours:
                name = type(loaded).__name__
                return (
                    loaded,
                    f"{name} encodes {ascii(text[:40])} as {theirs[:8]}, and nanotrain as {ours[:8]}",
                )
    except Exception as error:  # the library raises many
        return None, first_line(error)
    if loaded.eos_token_id != tokenizer.eod:
        return (
            loaded,
            f"its end-of-document token is {loaded.eos_token_id}, and that of the training {tokenizer.eod}",
        )
    return loaded, ""


def _texts(tokenizer: FastTokenizer | SlowTokenizer) -> Iterator[str]:
    yield from _TEXTS.split("|")
    if isinstance(tokenizer, FastTokenizer):
        yield from (
            f"a {token}{token} b"
            for token in map(str, tokenizer.backend.get_added_tokens_decoder().values())
        )
    for first in range(0, tokenizer.vocab_size, _IDS_PER_TEXT):
        yield tokenizer.decode(range(first, min(first + _IDS_PER_TEXT, tokenizer.vocab_size)))
