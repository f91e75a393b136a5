"""What a folder says about generation: generation_config.json, and the ends in config.json.

    what is not given               is the folder's, else
    temperature, top_k, top_p       0.8 on the command line, 1.0 in Python; all tokens
    repetition_penalty              none
    number of new tokens            120
    ends of a text                  the end-of-document token of the tokenizer

As in transformers, `do_sample: true` without a temperature has temperature 1; `do_sample: false` is
greedy, and so is a file that sets temperature, top_k or top_p without `do_sample`.

Ends are those of generation_config.json, else those of config.json. `max_length`, which counts the
prompt, is not read. Other options that change the tokens are named once and not applied.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanotrain.data.tokenizer import Tokenizer
from nanotrain.errors import ConfigError, DataError
from nanotrain.inference.sampling import Sampling
from nanotrain.untrusted import (
    list_of,
    object_of,
    parse_json,
    read_file,
    text_of,
    unreadable,
    whole_number,
)

GENERATION_CONFIG = "generation_config.json"
MAX_BYTES = 1 << 24
MAX_ENDS = 256
NUM_TOKENS = 120  # new tokens where nobody sets a number
# options of sampling, and the values that say nothing
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
# other options of transformers that change the tokens, and the value that changes nothing
UNREAD = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": None,
    "min_length": 0,
    "min_new_tokens": None,
    "min_p": None,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}


@dataclass(frozen=True)
class GenerationDefaults:
    """Default sampling, used where a caller sets nothing; None and () if the folder sets none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    ends: tuple[int, ...] = ()  # tokens that end a text
    stops: tuple[str, ...] = ()  # strings that end a text
    unread: tuple[str, ...] = ()  # options of the folder that are not applied, as "min_p 0.05"

    def sampling(self, *, temperature: float, seed: int = 0) -> Sampling:
        """The sampling of the folder; `temperature` where it says none."""
        return Sampling(
            temperature if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=seed,
            stop=self.ends,
            repetition_penalty=self.repetition_penalty,
        )

    def describe(self) -> list[str]:
        """One line on settings of the folder, and one on settings without effect; [] for none."""
        options = []
        for name in ("temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None:
                options.append(f"{name} {value:g}")
        lines = []
        if options:
            lines.append(f"{GENERATION_CONFIG}: {', '.join(options)}, where no flag says else")
        if self.unread:
            lines.append(f"{GENERATION_CONFIG} also sets {', '.join(self.unread)}: not applied")
        return lines


def defaults_of_folder(folder: Path, tokenizer: Tokenizer) -> GenerationDefaults:
    """The defaults of a Hugging Face folder; ends that it does not name are the tokenizer's."""
    defaults = read_defaults(folder)
    return replace(defaults, ends=defaults.ends or _end_of(tokenizer))


def defaults_of_run(step: Path, tokenizer: Tokenizer) -> GenerationDefaults:
    """The defaults of a run, whose tokenizer's folder has the file.

    Its texts also end at the end-of-document token, after which its documents ended.
    """
    end = _end_of(tokenizer)
    content = getattr(tokenizer, "files", {}).get(GENERATION_CONFIG)
    if content is None:
        return GenerationDefaults(ends=end)
    source = f"{GENERATION_CONFIG} of the tokenizer of {step}"
    defaults = parse_defaults(content, source=source)
    return replace(defaults, ends=tuple(dict.fromkeys([*defaults.ends, *end])))


def _end_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The end-of-document token, if there is one."""
    return () if tokenizer.eod is None else (tokenizer.eod,)


def read_defaults(folder: Path) -> GenerationDefaults:
    """The defaults of a Hugging Face folder.

    Raises:
        DataError: one of the two files is damaged.
    """
    defaults = GenerationDefaults()
    file = folder / GENERATION_CONFIG
    if file.exists():
        defaults = parse_defaults(_read(file), source=str(file))
    if defaults.ends:
        return defaults
    file = folder / "config.json"
    try:
        config = object_of(parse_json(_read(file), allow_nan=True), "it")
        nested = config.get("text_config")
        inner = nested if isinstance(nested, dict) else {}
        ends = config.get("eos_token_id", inner.get("eos_token_id"))
        return replace(defaults, ends=_parse_ends(ends))
    except ValueError as error:
        raise DataError(f"{file} cannot be read", why=str(error), fix="correct it") from None


def parse_defaults(content: bytes, *, source: str) -> GenerationDefaults:
    """The defaults of the bytes of a generation_config.json.

    Raises:
        DataError: it is damaged, or a value is out of its limits.
    """
    try:
        fields = object_of(parse_json(content, allow_nan=True), "it")
        most = fields.get("max_new_tokens")
        defaults = GenerationDefaults(
            temperature=_temperature(fields),
            top_k=_unless_neutral(fields, "top_k", neutral=NEUTRAL["top_k"]),
            top_p=_unless_neutral(fields, "top_p", neutral=NEUTRAL["top_p"]),
            repetition_penalty=_unless_neutral(fields, "repetition_penalty", neutral=1.0),
            max_new_tokens=None if most is None else whole_number(most, "max_new_tokens", low=1),
            ends=_parse_ends(fields.get("eos_token_id")),
            stops=_parse_stops(fields.get("stop_strings")),
            unread=_unread_options(fields),
        )
        # limits, also of a temperature that greedy decoding does not use
        replace(defaults, temperature=fields.get("temperature")).sampling(temperature=1.0)
    except (ValueError, ConfigError) as error:
        raise DataError(
            f"{source} cannot be read", why=str(error), fix="correct or remove it"
        ) from None
    return defaults


def _read(file: Path) -> bytes:
    try:
        return read_file(file, most=MAX_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} cannot be read", why=unreadable(error), fix="correct or remove it"
        ) from None


def _temperature(fields: Mapping[str, Any]) -> Any:
    """The temperature; 0 where transformers is greedy, None if the file does not say."""
    does_sample = fields.get("do_sample")
    if does_sample is True:
        return fields.get("temperature", 1.0)
    sets_sampling = any(
        _unless_neutral(fields, name, neutral=neutral) is not None
        for name, neutral in NEUTRAL.items()
    )
    if does_sample is False or sets_sampling:
        return 0.0
    return None


def _unless_neutral(fields: Mapping[str, Any], name: str, *, neutral: float) -> Any:
    """The value of a field; None if it is the neutral value, which changes nothing."""
    value = fields.get(name)
    return None if value == neutral else value


def _parse_ends(value: Any) -> tuple[int, ...]:
    """The token ids of eos_token_id: one, or several in a list."""
    if value is None:
        return ()
    if not isinstance(value, list):
        return (whole_number(value, "eos_token_id"),)
    if len(value) > MAX_ENDS:
        raise ValueError(f"eos_token_id has {len(value)} tokens, it must have at most {MAX_ENDS}")
    return tuple(whole_number(token, "eos_token_id") for token in value)


def _parse_stops(value: Any) -> tuple[str, ...]:
    """The texts of stop_strings: one, or several in a list."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (text_of(value, "stop_strings"),)
    return tuple(text_of(text, "stop_strings") for text in list_of(value, "stop_strings"))


def _unread_options(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The options that change tokens and are not applied."""
    unread = []
    for name, neutral in UNREAD.items():
        value = fields.get(name)
        if value is not None and value != neutral:
            unread.append(f"{name} {json.dumps(value)[:40]}")
    return tuple(unread)
