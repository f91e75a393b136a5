"""Files that travel with the weights: tokenizer, generation_config.json, config.json.

The origin of a model is the Hugging Face folder that its weights were imported from. Where its
config.json describes the exported model, it is written as it is there, with entries that nanotrain
does not read; so import and export are the identity. Another model gets its own config.json with
the special tokens of the origin.

A tokenizer is exported only if transformers' AutoTokenizer loads it alike: with equal ids, and the
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
from nanotrain.data.pretrained import first_line
from nanotrain.data.same_tokenizer import is_same_tokenizer
from nanotrain.data.tokenizer import FastTokenizer, SlowTokenizer, load_with_files
from nanotrain.data.tokenizer_files import GENERATION_FILE, TEMPLATE_FILE, VOCABULARY_FILES
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.canonical import canonical, free_keys
from nanotrain.interop.hf.families import (
    FAMILIES,
    MAX_CONFIG_BYTES,
    config_from_hf,
    model_from_hf,
    read_config,
    read_full_config,
)
from nanotrain.interop.hf.weights import WeightFiles
from nanotrain.runs.files import write_bytes, write_text
from nanotrain.untrusted import own_file, read_file

CONFIG_FILE = "config.json"
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Entries that do not hold for the export: weights are dequantized, and no code is copied.
_NOT_EXPORTED = ("quantization_config", "auto_map")
# Texts whose ids are compared, with all special tokens and texts of the whole vocabulary.
_TEXTS = (
    " a|a |  a  b   c|\n|a\n\n b\r\n\tc|I'm we'LL 1234567.8|gr\u00f6\u00dfer e\u0301 \ufb01"
    "|\u65e5\u672c\u3002|\u0645|\u0928 \U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f"
    "|\u00a0\u2003\u200b\ufeff|\u2581a <0x0A> \u0120"
)
_IDS_PER_TEXT = 64


@dataclass(frozen=True)
class Companions:
    """Sources of the files that an export has besides the weights.

    Attributes:
        tokenizer: the tokenizer, as `load_tokenizer` takes it; None for none.
        origin: the Hugging Face folder that the model was imported from, if it is known and still
            there.
    """

    tokenizer: str | None = None
    origin: Path | None = None

    @cached_property
    def has_own_tokenizer(self) -> bool:
        """Whether the special tokens of the origin belong to the exported tokenizer."""
        if self.origin is None:
            return False
        if self.tokenizer is None or self.tokenizer == str(self.origin):
            return True
        return bool(is_same_tokenizer(self.tokenizer, str(self.origin)))

    @cached_property
    def origin_config(self) -> dict[str, Any]:
        """config.json of the origin; {} where the folder is gone or is no longer a model."""
        if self.origin is None:
            return {}
        try:
            return read_config(self.origin)
        except HuggingFaceError:
            return {}

    def dtypes(self) -> dict[str, str]:
        """The data types of the origin's tensors by name; {} where it is unknown."""
        family = FAMILIES.get(str(self.origin_config.get("model_type")))
        if self.origin is None or family is None:
            return {}
        try:
            return WeightFiles(self.origin, prefix=family.prefix).dtypes
        except HuggingFaceError:
            return {}

    def config(
        self, model_config: ModelConfig, written: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Path | None]:
        """The config.json of an export without its dtype, and a file that already is this one.

        Args:
            model_config: configuration of the exported model.
            written: the entries that nanotrain writes.
        """
        if self.origin is None:
            return dict(written), None
        raw = self.origin_config
        is_same_family = raw.get("model_type") == written["model_type"]
        if is_same_family and _describes_model(self.origin, model_config):
            kept = self._kept_entries(written["torch_dtype"])
            is_untied_there = config_from_hf(raw).untie_embeddings_and_output_weights
            if is_untied_there != model_config.untie_embeddings_and_output_weights:
                # the files of the origin have a head that its config.json denies
                kept["tie_word_embeddings"] = written["tie_word_embeddings"]
            if kept == read_full_config(self.origin):
                return kept, self.origin / CONFIG_FILE
            return kept, None
        entries = dict(written)
        if self.has_own_tokenizer:
            entries |= {name: raw[name] for name in SPECIAL_TOKENS if name in raw}
        return entries, None

    def _kept_entries(self, dtype: str) -> dict[str, Any]:
        """The origin's entries that hold for the export, with the dtype of the export."""
        left_out = set(_NOT_EXPORTED)
        if not self.has_own_tokenizer:
            left_out.update(SPECIAL_TOKENS)
        kept = {key: value for key, value in self.origin_config.items() if key not in left_out}
        if "dtype" in kept:
            kept["dtype"] = dtype
        if "torch_dtype" in kept or "dtype" not in kept:
            kept["torch_dtype"] = dtype
        return kept

    def write_tokenizer(self, folder: Path) -> dict[str, Any]:
        """Write the tokenizer; returns the entries of config.json that name its special tokens.

        Raises:
            DataError: it cannot be loaded.
            HuggingFaceError: transformers loads another one from its files.
        """
        if self.tokenizer is None:
            return {}
        tokenizer = load_with_files(self.tokenizer)
        tokenizer.save(folder, as_published=True)
        loaded, difference = _load_again(tokenizer, folder)
        if difference and isinstance(tokenizer, FastTokenizer):
            tokenizer.save(folder)
            loaded, difference = _load_again(tokenizer, folder)
        if difference:
            raise HuggingFaceError(
                f"transformers' AutoTokenizer does not load {self.tokenizer} as nanotrain does",
                why=difference,
                fix=(
                    "give another --tokenizer or --family, "
                    "or --tokenizer none to export the weights alone"
                ),
            )
        if self.has_own_tokenizer:
            return {}
        return {"bos_token_id": loaded.bos_token_id, "eos_token_id": loaded.eos_token_id}

    def write_generation_config(self, folder: Path, tokens: Mapping[str, Any]) -> None:
        """Write generation_config.json unless the tokenizer brought one.

        It is a copy of the origin's where the tokenizer is the same, else made from `tokens`.

        Args:
            folder: the folder to write into.
            tokens: ids of special tokens by their entries; None for unknown.
        """
        target = folder / GENERATION_FILE
        if target.is_file():
            return
        source = None if self.origin is None else self.origin / GENERATION_FILE
        if source is not None and self.has_own_tokenizer and source.is_file():
            try:
                content = read_file(own_file(source), most=MAX_CONFIG_BYTES)
            except ValueError as error:
                what = f"{source} is not copied"
                raise HuggingFaceError(what, why=str(error), fix="remove it") from None
            write_bytes(target, content)
            return
        known = {name: token for name, token in tokens.items() if token is not None}
        if known:
            write_text(target, json.dumps(known, indent=2, sort_keys=True) + "\n")


def fullest_tokenizer(name: str | None, origin: Path | None) -> str | None:
    """The tokenizer of a model: `name`, or its origin's if it is the same or `name` is unknown.

    `name` may be a copy that lacks some of the origin's files. A copy whose chat template or ends
    of texts are other ones belongs to conversations that were learned since.
    """
    if origin is None or not any((origin / file).is_file() for file in VOCABULARY_FILES):
        return name
    if name is None:
        return str(origin)
    if is_same_tokenizer(name, str(origin)) and not _has_other_chat(Path(name), origin):
        return str(origin)
    return name


def _has_other_chat(folder: Path, origin: Path) -> bool:
    """Whether a tokenizer's folder has another chat template, or other ends, than its origin."""
    for file in (TEMPLATE_FILE, GENERATION_FILE):
        copy = folder / file
        original = origin / file
        if not copy.is_file():
            continue
        if not original.is_file() or copy.read_bytes() != original.read_bytes():
            return True
    return False


def _describes_model(folder: Path, model_config: ModelConfig) -> bool:
    """Whether the config.json of a folder describes a model; free fields may differ."""
    try:
        described = model_from_hf(folder)
    except HuggingFaceError:
        return False
    free = {key: value_of(described, key) for key in free_keys(described)}
    return canonical(with_values(model_config, free)) == canonical(described)


def _load_again(tokenizer: FastTokenizer | SlowTokenizer, folder: Path) -> tuple[Any, str]:
    """A saved tokenizer as transformers loads it, and the difference; "" without a difference."""
    from transformers import AutoTokenizer  # takes seconds

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        for text in _texts_to_compare(tokenizer):
            theirs = loaded.encode(text, add_special_tokens=False)
            ours = tokenizer.encode(text)
            if theirs != ours:
                name = type(loaded).__name__
                return loaded, (
                    f"{name} encodes {ascii(text[:40])} as {theirs[:8]}, "
                    f"and nanotrain as {ours[:8]}"
                )
    except Exception as error:  # the library raises many
        return None, first_line(error)
    if loaded.eos_token_id != tokenizer.eod:
        return loaded, (
            f"its end-of-document token is {loaded.eos_token_id}, "
            f"and that of the training {tokenizer.eod}"
        )
    return loaded, ""


def _texts_to_compare(tokenizer: FastTokenizer | SlowTokenizer) -> Iterator[str]:
    """Texts on which two tokenizers are compared."""
    yield from _TEXTS.split("|")
    if isinstance(tokenizer, FastTokenizer):
        for token in tokenizer.backend.get_added_tokens_decoder().values():
            yield f"a {token}{token} b"
    for first in range(0, tokenizer.vocab_size, _IDS_PER_TEXT):
        last = min(first + _IDS_PER_TEXT, tokenizer.vocab_size)
        yield tokenizer.decode(range(first, last))
