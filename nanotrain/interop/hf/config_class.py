"""config.json as transformers' own config class understands it.

The rule: what transformers understands of a config.json is what nanotrain trains, or it is refused
by name. It needs three steps.

    understand      the entries that transformers' class keeps, with its defaults and precedences
    Entries         these entries; reading one is remembered
    pass_over       read entries without effect on this model
    refuse_unread   an error for an entry that no reader read, unless it has no effect on logits

No network and no code of the folder takes part. The class of the family is called with the parsed
file, and nothing else of transformers.
"""

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.tables import EFFECTS, read_tables
from nanotrain.untrusted import plain_text, shown, whole_number

MAX_REASON = 200  # characters of an error of a class
MAX_LAYERS = 1000  # classes list all layers, one by one
SPECIAL_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


class Entries(dict[str, Any]):
    """Entries of a config.json that remember which of them were read.

    `entries | changes` shares the memory, `dict(entries)` has none.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        names: Mapping[str, str] | None = None,
        read: set[str] | None = None,
    ) -> None:
        super().__init__(values)
        self.names = dict(names or {})  # entry -> the entry with its value in the file
        self.was_read = set() if read is None else read

    def __getitem__(self, entry: str) -> Any:
        self._remember(entry)
        return super().__getitem__(entry)

    def get(self, entry: str, default: Any = None) -> Any:
        """The value of an entry, or the default."""
        self._remember(entry)
        return super().get(entry, default)

    def __or__(self, changes: Mapping[str, Any]) -> "Entries":  # type: ignore[override]
        values = dict(self)
        values.update(changes)
        return Entries(values, names=self.names, read=self.was_read)

    def _remember(self, entry: str) -> None:
        self.was_read.add(entry)
        self.was_read.add(self.names.get(entry, entry))


def pass_over(entries: dict[str, Any], *names: str) -> None:
    """Read entries of a feature that the model does not have."""
    for name in names:
        entries.get(name)


def understand(raw: Mapping[str, Any]) -> Entries:
    """The entries of a parsed config.json that the config class of its `model_type` keeps.

    Raises:
        HuggingFaceError: transformers has no such class, or the class refuses the file.
    """
    kind = str(raw.get("model_type"))
    _check_layer_counts(raw)
    config_class = _find_class(kind)
    not_given = read_tables(EFFECTS)["not_given_to_the_class"]
    content = {name: value for name, value in raw.items() if name not in not_given}
    try:
        return Entries(_kept_by(config_class, content) | {"model_type": kind})
    except Exception as error:  # the classes raise many
        raise HuggingFaceError(
            f"transformers does not understand the config.json of this {kind}",
            why=_first_sentence(error),
            fix="fetch the folder again, or choose another checkpoint",
        ) from None


def refuse_unread(
    raw: Mapping[str, Any], entries: Entries, *, declared: Mapping[str, Any] | None = None
) -> None:
    """Refuse entries that nothing read, unless leaving them out means the same or has no effect.

    Args:
        raw: the parsed config.json.
        entries: what `understand` made of it; the readers have read them.
        declared: defaults of a model that transformers has no class of; None for its class's.

    Raises:
        HuggingFaceError: there are such entries; the first is named with its value.
    """
    tables = read_tables(EFFECTS)
    kind = entries["model_type"]
    config_class = None
    if declared is None:
        config_class = _find_class(kind)
        declared = _kept_by(config_class, {})
    for name in sorted(entries.keys() - entries.was_read - without_effect(kind)):
        value = dict.__getitem__(entries, name)
        expected = declared.get(name)
        is_undeclared = config_class is not None and name not in declared
        if value == expected or (is_undeclared and name not in tables["read_undeclared"]):
            continue
        is_of_class = config_class is not None and name in declared
        if is_of_class and _follows(raw, name, value=value, config_class=config_class):
            continue
        raise HuggingFaceError(
            f"config.json has {name}: {shown(value)}",
            why=f"nanotrain does not read it for a {kind}, and it may change what is computed",
            fix=f"choose a checkpoint whose {name} is {json.dumps(expected)[:48]}",
        )


def has_class(kind: str) -> bool:
    """Whether transformers has a config class of a `model_type`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return kind in CONFIG_MAPPING


def class_defaults(kind: str) -> dict[str, Any]:
    """The entries of transformers' class of a `model_type` without a config.json."""
    return _kept_by(_find_class(kind), {})


def _kept_by(config_class: Any, content: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that a config class keeps of a parsed config.json, with its defaults."""
    with silence_transformers():  # of entries that are checked here
        config = config_class(**_decode_floats(dict(content)))
        if getattr(config, "rope_parameters", None):
            # again, as code that scales rotary positions does: only now has the config the
            # entries that its class does not declare
            config.standardize_rope_params()
        kept: dict[str, Any] = config.to_dict()
    return kept


def _follows(raw: Mapping[str, Any], name: str, *, value: Any, config_class: Any) -> bool:
    """Whether a config class derives the value of an entry from other entries."""
    left_out = {name, *read_tables(EFFECTS)["not_given_to_the_class"]}
    for other, own_name in config_class.attribute_map.items():
        if own_name == name:
            left_out.add(other)
    others = {entry: raw[entry] for entry in raw if entry not in left_out}
    try:
        return bool(_kept_by(config_class, others)[name] == value)
    except Exception:  # the class needs the entry
        return False


def _first_sentence(error: Exception) -> str:
    """The reason of an error of a config class in one line, without the types it tried."""
    text = " ".join(str(error).partition("Errors:")[0].split())
    return f"{type(error).__name__}: {plain_text(text)[:MAX_REASON]}"


def _find_class(kind: str) -> Any:
    """The config class of a `model_type`."""
    # takes a second; not from `transformers`, which replaces itself while a thread imports it
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    published = read_tables(EFFECTS)["published_names"]
    name = published.get(kind, kind)
    if name not in CONFIG_MAPPING:
        from transformers import __version__

        raise HuggingFaceError(
            f"transformers {__version__} has no model_type {name}",
            why="config.json is read with transformers' own class for it",
            fix="install a newer transformers: pip install -U transformers; or, for one of your "
            "own, transformers.AutoConfig.register with its class",
        )
    return CONFIG_MAPPING[name]


def _check_layer_counts(raw: Mapping[str, Any]) -> None:
    """Refuse large numbers of layers, before a class makes lists of that length."""
    for name, value in raw.items():
        is_count = "layer" in name and "per_layer" not in name
        if is_count and isinstance(value, int) and value > MAX_LAYERS:
            whole_number(value, name, high=MAX_LAYERS)


def without_effect(kind: str) -> frozenset[str]:
    """Entries that do not change logits of a family, files and versions among them."""
    tables = read_tables(EFFECTS)
    names = set(tables["not_given_to_the_class"])
    for group in tables["without_effect"].values():
        names.update(group)
    for group in tables["without_effect_in"].get(kind, {}).values():
        names.update(group)
    return frozenset(names)


def _decode_floats(value: Any) -> Any:
    """Floats that JSON lacks, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_decode_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in SPECIAL_FLOATS:
        return SPECIAL_FLOATS[value["__float__"]]
    return {name: _decode_floats(item) for name, item in value.items()}


@contextmanager
def silence_transformers() -> Iterator[None]:
    """transformers writes no warnings and no progress in the block."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    had_progress = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if had_progress:
            logging.enable_progress_bar()
