"""Derive the row of a folder: read its files, apply the rules, and account for every entry.

derive_family   the findings of a folder
candidates      the rows that the findings leave, the likeliest first
nearest_family  the known family with most names and entries in common
"""

from collections.abc import Mapping
from copy import deepcopy
from itertools import islice, product
from pathlib import Path
from typing import Any

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.config_class import (
    Entries,
    class_defaults,
    has_class,
    understand,
    without_effect,
)
from nanotrain.interop.hf.derive.configuration import ConfigurationText, read_configuration
from nanotrain.interop.hf.derive.findings import STANDARD, Findings, Row
from nanotrain.interop.hf.derive.row import derive_row
from nanotrain.interop.hf.derive.source import ModelingSource, read_source
from nanotrain.interop.hf.derive.tensors import TensorTable, read_table
from nanotrain.interop.hf.families import (
    DAMAGE,
    FAMILIES,
    SHARED_ENTRIES,
    build_family,
    read_full_config,
)
from nanotrain.interop.hf.layer_types import FULL
from nanotrain.interop.hf.weights import HEADS, INDEX, PICKLES, SINGLE, WeightFiles
from nanotrain.untrusted import plain_text

MAX_CANDIDATES = 8
OFF: tuple[Any, ...] = (
    None,
    False,
    0,
    0.0,
    1.0,
    "",
    [],
    {},
)  # values of switches and factors without effect


def derive_family(folder: Path) -> Findings:
    """The findings of a folder: the row of its family, or the facts that a row still needs.

    Raises:
        HuggingFaceError: files that cannot be read, or a family that has a row.
    """
    raw = _text_config(read_full_config(folder))
    kind = str(raw.get("model_type", "(none)"))
    if kind in FAMILIES:
        raise HuggingFaceError(
            f"model_type {kind} has a row already",
            why=f"nanotrain reads {folder} as it is",
            fix=f"use it: --pretrained-checkpoint {folder}",
        )
    architecture, class_name = _architectures(kind, raw)
    source = read_source(folder, kind=kind, architecture=class_name)
    try:
        configuration = None
        if not has_class(kind):
            configuration = read_configuration(folder, raw=raw, kind=kind)
        entries, row = _read_entries(kind, raw, configuration=configuration)
        table = _read_tensors(folder, kind, entries=entries)
        f = Findings(kind, architecture, entries, table, source, row=row)
        f.configuration = configuration
        f.defaults = row["defaults"] if configuration else class_defaults(kind)
        if table.num_later_layers:
            row["ignores_later_layers"] = True
            f.notes.append(f"{table.num_later_layers} layers after the last one are not read")
        if not has_weights(folder):
            f.notes.append("the folder has no weights: names are those that transformers saves")
        if derive_row(f):
            _account_for_entries(f)
    except (*DAMAGE, RecursionError, MemoryError) as error:
        raise HuggingFaceError(
            f"config.json, tensors or code of {folder} describe no model",
            why=f"{type(error).__name__}: {plain_text(str(error))[:200]}",
            fix="fetch the folder again",
        ) from None
    return f


def candidates(f: Findings) -> list[Row]:
    """The rows that the findings leave, the likeliest first, at most MAX_CANDIDATES."""
    rows = []
    for patches in islice(product(*f.choices), MAX_CANDIDATES):
        row = deepcopy(f.row)
        for patch in patches:
            row["layers"] |= patch["layers"]
        rows.append(row)
    return rows


def nearest_family(f: Findings) -> tuple[str, int, int]:
    """The known family with most in common: its name, the common features, and all of the row."""
    own = _features(build_family(f.kind, f.row))
    scores = {name: len(own & _features(family)) for name, family in FAMILIES.items()}
    nearest = max(scores, key=lambda name: scores[name])
    return nearest, scores[nearest], len(own)


def _features(family: Any) -> set[tuple[str, str]]:
    """Names of tensors, settings of entries and fixed settings of a family."""
    features = {(module, name.name) for module, name in family.layers.items()}
    features |= {("entry", f"{entry}: {key}") for entry, key in family.entries.items()}
    features |= {("fixed", f"{key}: {value}") for key, value in family.fixed.items()}
    return features


def _text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The entries of the text model, of a model that sees images too."""
    text = raw.get("text_config")
    if not isinstance(text, dict) or "model_type" not in text:
        return raw
    shared = {key: raw[key] for key in SHARED_ENTRIES if key in raw}
    return shared | text


def _architectures(kind: str, raw: Mapping[str, Any]) -> tuple[str, str]:
    """The name of the class in config.json, and the name of the class whose code computes it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = raw.get("architectures")
    own = str(named[0]) if isinstance(named, list) and named else ""
    installed = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, ""))
    if not own and not installed:
        raise HuggingFaceError(
            f"config.json of {kind} names no class",
            why="its `architectures` is what its modeling code is searched for",
            fix="give a folder as `save_pretrained` writes it",
        )
    return own or installed, installed or own


def _read_entries(
    kind: str, raw: dict[str, Any], *, configuration: ConfigurationText | None
) -> tuple[Any, Row]:
    """The entries with defaults, and the row's tables about them.

    The defaults come from the configuration class of transformers. Without one they are the literal
    defaults in the text of the folder's configuration class.
    """
    if configuration is None:
        return understand(raw), {}
    ignored = without_effect(kind)
    defaults = {
        name: value for name, value in configuration.defaults.items() if name not in ignored
    }
    return Entries(defaults | raw), {"without_class": True, "defaults": defaults}


def has_weights(folder: Path) -> bool:
    """Whether a folder has files of weights, readable or not."""
    names = (SINGLE, INDEX, *PICKLES)
    return any((folder / name).exists() for name in names)


def _read_tensors(folder: Path, kind: str, *, entries: Any) -> TensorTable:
    """The tensors of a folder, from the headers of its files.

    Without files it lists the tensors that transformers' class would save.
    """
    names = ("num_hidden_layers", *STANDARD["num_hidden_layers"])
    counts = [entries[name] for name in names if name in entries]
    num_layers = counts[0] if counts else None
    if has_weights(folder) or not has_class(kind):
        shapes = WeightFiles(folder, prefix="").shapes
    else:
        shapes = _shapes_of_class(kind, entries)
    table = read_table(shapes, num_layers=num_layers)
    if table is None:
        raise HuggingFaceError(
            f"no tensor of {folder} has the number of a layer in its name",
            why=f"names are like {next(iter(shapes), '(none)')}",
            fix="give the folder of a causal language model",
        )
    return table


def _shapes_of_class(kind: str, entries: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that transformers' class of a `model_type` saves, without allocating it."""
    import torch
    from transformers import AutoConfig
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    known = {name: value for name, value in entries.items() if name != "model_type"}
    try:
        config = AutoConfig.for_model(kind, **known)
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            model = model_class(config)
        tensors = revert_weight_conversion(model, model.state_dict())
    except Exception as error:  # the classes raise many
        raise HuggingFaceError(
            f"transformers' class of {kind} builds no model of this config.json",
            why=plain_text(f"{type(error).__name__}: {error}")[:200],
            fix="give a folder with weights: their headers have names and shapes",
        ) from None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if not entries.get("tie_word_embeddings"):
        return shapes
    return {name: shape for name, shape in shapes.items() if not name.startswith(HEADS)}


def _account_for_entries(f: Findings) -> None:
    """Read config.json by the row; every entry that the code uses has to have a meaning."""
    try:
        build_family(f.kind, f.row).read(f.entries)
    except HuggingFaceError as error:
        f.lack("a value of an entry", asked_by=f"{error.what}; {error.why}")
        return
    except DAMAGE as error:
        f.lack("an entry that a part reads", asked_by=f"{type(error).__name__}: {error}")
        return
    unread = f.entries.keys() - f.entries.was_read - without_effect(f.kind)
    for entry in sorted(unread):
        _account_for(f, entry)
    if f.configuration is not None and f.source is not None:
        _require_values(f, f.source, names=f.configuration.aliases)


def _account_for(f: Findings, entry: str) -> None:
    """Decide about one entry that the row does not read."""
    value = dict.__getitem__(f.entries, entry)  # f.entries[entry] would count as read
    is_compared = f.configuration is None
    if not _is_used(f, entry, value=value):
        if not _is_default(f, entry, value=value):
            passed_over: list[str] = f.row.setdefault("passed_over", [])
            passed_over.append(entry)
    elif _is_off(value) and is_compared:
        f.require(entry, value)
        f.notes.append(f"{entry}: taken as off at {value}; another value is refused")
    elif _is_off(value) or isinstance(value, bool | str) or value == 1:
        # the code may do something where a switch is off: only a comparison tells
        f.require(entry, value)
        f.unproven.append(entry)
    else:
        f.lack("the meaning of an entry", asked_by=f.place_of(entry))


def _is_used(f: Findings, entry: str, *, value: Any) -> bool:
    """Whether the code may use an entry.

    Where no comparison with transformers follows, an entry that the code names anywhere counts.
    """
    if f.source is None or entry in f.source.reads:
        return True
    if f.configuration is None:
        return False
    if f.source.mentions(entry):
        return True
    return not _is_default(f, entry, value=value) and entry in f.configuration.computes


def _is_default(f: Findings, entry: str, *, value: Any) -> bool:
    """Whether an entry has the value that a config.json without it would have."""
    return entry in f.defaults and bool(f.defaults[entry] == value)


def _require_values(f: Findings, source: ModelingSource, *, names: frozenset[str]) -> None:
    """Note as missing each entry that the code reads without a value or a known default."""
    from transformers import PreTrainedConfig

    known = f.entries.keys() | names | set(dir(PreTrainedConfig())) | without_effect(f.kind)
    for entry in sorted(source.reads.keys() - known):
        if entry in source.needed or entry not in f.entries.was_read:
            place = f"{entry}, read by {source.reads[entry]}"
            f.lack("the value of an entry that config.json does not have", asked_by=place)


def _is_off(value: Any) -> bool:
    """Whether a switch or a factor with this value is off; for lists, whether all layers are."""
    if isinstance(value, list) and value and set(map(str, value)) == {FULL}:
        return True
    return any(type(value) is type(off) and value == off for off in OFF)
