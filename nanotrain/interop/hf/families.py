"""Hugging Face families, and ModelConfig to and from their config.json.

A family can represent a model exactly if writing its config.json and reading it back gives the same
model, so no feature is lost. docs/new_family.md shows how to add a family: one row of
families.yaml.

    FAMILIES, load_families           the families, from the tables of families.yaml
    config_from_hf, model_from_hf     config.json -> ModelConfig
    read_config, read_full_config     the parsed config.json of a folder
    family_of, config_to_hf           ModelConfig -> config.json
    check_against                     the configured model against a pretrained checkpoint
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nanotrain.config.config import Config, DataConfig
from nanotrain.config.model import ModelConfig, MTPConfig
from nanotrain.config.rules.check import check_model
from nanotrain.config.schema import (
    KEYS,
    config_from_dict,
    convert,
    flat_values,
    nest,
    typed,
    value_of,
    with_values,
    without_absent,
)
from nanotrain.errors import ConfigError, HuggingFaceError
from nanotrain.interop.hf.canonical import canonical, changed_positions, free_keys
from nanotrain.interop.hf.config_class import Entries, refuse_unread, understand
from nanotrain.interop.hf.folder_row import ROW_FILE, read_folder_row
from nanotrain.interop.hf.layout import COUNTED, Layout, Raw, Values
from nanotrain.interop.hf.names import HFName, Naming
from nanotrain.interop.hf.parts import PARTS
from nanotrain.interop.hf.tables import MODELS, TABLES, read_tables
from nanotrain.interop.hf.weights import has_mtp_weights, has_other_head, refuse_adapter
from nanotrain.log import log_once
from nanotrain.untrusted import (
    object_of,
    own_file,
    parse_json,
    read_file,
    shown,
    unreadable,
    whole_number,
)

# what a reader of entries raises where one has a value of another type
DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
MAX_CONFIG_BYTES = 1 << 24  # the config.json of a model has 1 to 20 kB
NUM_NEAREST = 3  # families that an error about a model without one names
# entries beside `text_config` that are also about the text model
SHARED_ENTRIES = ("dtype", "quantization_config", "tie_word_embeddings", "torch_dtype")

Row = dict[str, Any]  # a family as a row of families.yaml


@dataclass(frozen=True, kw_only=True)
class Family(Layout, Naming):
    """One `model_type` of Hugging Face: its config.json, and the names of its tensors."""

    architecture: str  # class name in config.json
    # prefix of every tensor but the head; files of the base model without a head omit it
    prefix: str = "model."
    # patterns of names that are no weights of the model (buffers in old files)
    ignored: Sequence[str] = ()
    # files may have layers after the model's, for multi-token prediction that is left out
    ignores_later_layers: bool = False
    # transformers has no class of it: config.json is read as it is, with `defaults`
    without_class: bool = False

    @property
    def namings(self) -> tuple[Naming, ...]:
        """The names that files may have; the first ones are written."""
        others = [replace(self, layers={**self.layers, **other}) for other in self.other_layers]
        if self.other_ends:
            others.insert(0, replace(self, ends={**self.ends, **self.other_ends}))
        return (self, *others)


def load_families(path: Path = TABLES) -> dict[str, Family]:
    """The families of a file such as families.yaml; its rows may start from rows of that file."""
    rows: dict[str, Row] = {}
    for file in (TABLES, path):
        tables = read_tables(file)
        rows |= tables.get("shared", {})
        rows |= tables["families"]
    families = {}
    for name in read_tables(path)["families"]:
        families[name] = _build_family(_complete_row(name, rows))
    return families


def build_family(kind: str, row: Row) -> Family:
    """A family from a row that starts from rows of the package."""
    tables = read_tables()
    rows = tables["shared"] | tables["families"] | {kind: deepcopy(row)}
    return _build_family(_complete_row(kind, rows))


def known_rows() -> frozenset[str]:
    """The names of the rows that a row of a folder may start from."""
    tables = read_tables()
    return frozenset((*tables["shared"], *tables["families"]))


def _complete_row(name: str, rows: Mapping[str, Row]) -> Row:
    """A row with the tables and lists of the rows that it starts from, in front of its own."""
    row = dict(rows[name])
    bases = row.pop("from", [])
    if isinstance(bases, str):
        bases = [bases]
    complete: Row = {}
    for base in bases:
        _add_row(complete, _complete_row(base, rows))
    _add_row(complete, row)
    return complete


def _add_row(complete: Row, row: Row) -> None:
    """Add the values of another row: tables and lists are joined, other values are replaced."""
    for key, value in row.items():
        if isinstance(value, dict):
            complete[key] = complete.get(key, {}) | value
        elif isinstance(value, list):
            complete[key] = complete.get(key, []) + value
        else:
            complete[key] = value


def _build_family(row: Row) -> Family:
    """The family of a row, with values and names in the form that readers and writers use."""
    fixed = row.get("fixed", {})
    required = row.get("required", {})
    row["fixed"] = {key: convert(KEYS[f"model.{key}"], value) for key, value in fixed.items()}
    row["required"] = {entry: values for entry, values in required.items() if values}
    row["parts"] = [PARTS[name] for name in row["parts"]]
    for ends in ("ends", "other_ends"):
        row[ends] = _build_ends(row.get(ends, {}))
    row["layers"] = _build_names(row["layers"])
    row["other_layers"] = [_build_names(table) for table in row.get("other_layers", [])]
    return Family(**row)


def _build_ends(table: Mapping[str, Any]) -> dict[str, str | HFName]:
    """The names of the ends of a model; one with further fields becomes an `HFName`."""
    return {key: HFName(**name) if isinstance(name, dict) else name for key, name in table.items()}


def _build_names(table: Mapping[str, Any]) -> dict[str, HFName]:
    """The names of the modules of a layer; one that is text has no further fields."""
    names = _build_ends(table)
    return {key: HFName(name) if isinstance(name, str) else name for key, name in names.items()}


# A model is exported as the first family that can represent it.
FAMILIES: dict[str, Family] = load_families()
# the rows that lay in folders, by `model_type`: they are copied into exports
FOLDER_ROWS: dict[str, str] = {}


def add_folder_family(folder: Path) -> None:
    """Add the family whose row lies in a folder, if the package has none of its `model_type`.

    Raises:
        HuggingFaceError: the file is no row, or another folder had another row for the type.
    """
    found = read_folder_row(folder, known=known_rows())
    if found is None:
        return
    kind, row, text = found
    if kind in FOLDER_ROWS:
        if FOLDER_ROWS[kind] != text:
            raise HuggingFaceError(
                f"{folder / ROW_FILE} is another row for {kind} than a folder read before has",
                why="this process can have one row for a model_type",
                fix="keep one of them in both folders",
            )
        return
    if kind in FAMILIES:
        log_once(f"{folder / ROW_FILE} is not read: nanotrain has a row for {kind}")
        return
    try:
        FAMILIES[kind] = build_family(kind, row)
    except (ConfigError, *DAMAGE) as error:
        raise HuggingFaceError(
            f"{folder / ROW_FILE} is no row of a family",
            why=f"{type(error).__name__}: {shown(str(error))}",
            fix=f"remove it, and write it anew: nanotrain family add {folder}",
        ) from None
    FOLDER_ROWS[kind] = text


def config_from_hf(raw: Raw) -> ModelConfig:
    """Read the model configuration of a parsed config.json.

    Raises:
        HuggingFaceError: an unsupported family or feature.

    >>> config_from_hf({"model_type": "gpt2", "n_embd": 96, "n_head": 3}).hidden_size
    96
    """
    family = _find_family(str(raw.get("model_type", "(none)")))
    try:
        # With the bounds of a configuration: in a damaged file a size may be text, negative or a
        # fraction.
        values = _read_values(family, raw)
        config = config_from_dict({"model": nest(values)})
        return without_absent(config.model)
    except (ConfigError, *DAMAGE) as error:
        why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        what = "config.json has an entry that describes no model"
        raise HuggingFaceError(what, why=why, fix="fetch the folder again") from None


def _read_values(family: Family, raw: Mapping[str, Any]) -> Values:
    """The values of the model section; values that transformers' class refuses are refused."""
    declared = None
    if family.without_class:
        entries = Entries({**family.defaults, **raw})
        declared = family.defaults
    else:
        try:
            entries = understand(raw)
        except HuggingFaceError:
            with suppress(*DAMAGE):
                family.read(Entries(raw))  # the tables may name the entry and its supported values
            raise
    values = family.read(entries)
    refuse_unread(raw, entries, declared=declared)
    _check_values(values)
    return values


def _check_values(values: Values) -> None:
    """Check values of the model section: numbers are no text, and counts are bounded."""
    for key, value in values.items():
        if isinstance(value, str) and KEYS[f"model.{key}"].item in (int, float):
            raise ValueError(f"{key} is {shown(value)}, it must be a number")
    for key in COUNTED.keys() & values.keys():
        whole_number(values[key] or 0, key, high=COUNTED[key])
    num_layers = values.get("num_layers") or 0
    num_experts = values.get("moe.num_experts") or 0
    whole_number(num_layers * num_experts, "layers x experts", high=COUNTED["all experts"])


def model_from_hf(folder: Path) -> ModelConfig:
    """Read the model configuration of a Hugging Face folder; see `config_from_hf`.

    The files decide two things, as they do in transformers. A head that differs from the embedding
    is a head of the model, whatever `tie_word_embeddings` says. Layers of multi-token prediction
    that config.json names and the files lack are left out: transformers writes such folders.
    """
    raw = read_config(folder)
    model_config = config_from_hf(raw)
    _check_sizes(model_config)
    if not model_config.untie_embeddings_and_output_weights and _has_other_head(folder, raw):
        log_once(
            f"{folder}: config.json ties the head to the embedding and the files have another "
            "head, so it is not tied, as in transformers"
        )
        model_config = replace(model_config, untie_embeddings_and_output_weights=True)
    if model_config.mtp.num_layers and not has_mtp_weights(folder):
        return replace(model_config, mtp=MTPConfig())
    return model_config


def _check_sizes(model_config: ModelConfig) -> None:
    """Check that sizes fit each other by the rules of the model section."""
    data = DataConfig(seq_length=model_config.max_position_embeddings)
    try:
        check_model(Config(model=model_config, data=data))
    except ConfigError as error:
        raise HuggingFaceError(
            "config.json has entries that do not fit each other",
            why=" ".join(str(error).split()),
            fix="fetch the folder again, or choose another checkpoint",
        ) from None


def _has_other_head(folder: Path, raw: Mapping[str, Any]) -> bool:
    family = _find_family(str(raw["model_type"]))
    return has_other_head(
        folder,
        prefix=family.prefix,
        embedding=f"{family.ends['embedding.word']}.weight",
        head=f"{family.ends['head']}.weight",
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder; of a model that also sees images, its text model's.

    Raises:
        HuggingFaceError: no such folder, an adapter, no config.json, or not a JSON object.
    """
    raw = read_full_config(folder)
    add_folder_family(folder)
    text = raw.get("text_config")
    if str(raw.get("model_type")) in FAMILIES or not isinstance(text, dict):
        return raw
    kind = str(text.get("model_type"))
    if kind not in FAMILIES:
        return raw
    shared = {key: raw[key] for key in SHARED_ENTRIES if key in raw}
    return shared | text | {"architectures": [FAMILIES[kind].architecture]}


def read_full_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder as it is; see `read_config`."""
    path = folder / "config.json"
    refuse_adapter(folder)
    try:
        content = read_file(own_file(path), most=MAX_CONFIG_BYTES)
        return object_of(parse_json(content, allow_nan=True), "it")
    except (OSError, ValueError) as error:
        raise HuggingFaceError(
            f"cannot read {path}", why=unreadable(error), fix=cure_of_folder(folder)
        ) from None


def cure_of_folder(folder: Path) -> str:
    """The cure for a folder without config.json: a run, a name on the hub, or another folder."""
    is_step = (folder / "manifest.json").is_file()
    if is_step or (folder / "checkpoints").is_dir():
        return (
            f"--load {folder} --finetune starts from the weights of that run; "
            f"nanotrain checkpoint export-hf {folder} OUT makes a Hugging Face folder of it"
        )
    if not folder.exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(folder)):
        download = f"hf download {folder} --local-dir {folder.name}"
        return (
            f"give a folder as `save_pretrained` writes it; {download} fetches a model of that "
            f"name from the hub, then --pretrained-checkpoint {folder.name}"
        )
    return "give a folder as `save_pretrained` writes it, with config.json and *.safetensors"


def family_of(model_config: ModelConfig, *, name: str | None = None) -> str:
    """The family a model is exported as: `name`, or the first of FAMILIES that can represent it.

    Raises:
        HuggingFaceError: `name` is unknown, or no family (of that name) can represent the model.
    """
    families = FAMILIES if name is None else {name: _find_family(name)}
    free = set(free_keys(model_config)) - {"init_method_std"}
    values = flat_values(canonical(model_config))
    values = {key: value for key, value in values.items() if key not in free}
    lost_fields = {}
    for candidate, family in families.items():
        lost = _lost_fields(model_config, family, values=values)
        if not lost:
            return candidate
        lost_fields[candidate] = lost
    raise HuggingFaceError(
        "this model cannot be written as a Hugging Face model",
        why=_describe_lost(lost_fields),
        fix="export models of the families in docs/families.md only, or add one "
        "(docs/new_family.md)",
    )


def _describe_lost(lost_fields: Mapping[str, Sequence[str]]) -> str:
    """Text on the settings that the nearest of some families cannot represent."""

    def distance(name: str) -> tuple[bool, int]:
        lost = lost_fields[name]
        is_unknown = lost[0].startswith("a model ")  # how many fields is not known
        return is_unknown, len(lost)

    nearest = sorted(lost_fields, key=distance)[:NUM_NEAREST]
    reasons = [f"{name} cannot represent {', '.join(lost_fields[name])}" for name in nearest]
    num_others = len(lost_fields) - len(nearest)
    if num_others:
        reasons.append(f"{num_others} other families cannot either")
    return "; ".join(reasons)


def _lost_fields(
    model_config: ModelConfig, family: Family, *, values: Mapping[str, Any]
) -> list[str]:
    """Settings of a model that a family cannot represent.

    Args:
        model_config: the model.
        family: the family.
        values: values of the canonical model that depend on the weights, by key.
    """
    needs_experts = "moe.num_experts" in family.entries.values()
    if needs_experts and not value_of(model_config, "moe.num_experts"):
        return ["a model without experts"]
    try:
        written = family.write(model_config)
        back = with_values(ModelConfig(), family.read(written))
    except HuggingFaceError as error:
        return [f"a model whose {error.what}"]
    values_back = flat_values(canonical(back))
    return [key for key, value in values.items() if value != values_back[key]]


def config_to_hf(
    model_config: ModelConfig, *, family: str, dtype: str = "float32"
) -> dict[str, Any]:
    """The config.json of a model that `family` can represent, for transformers 4 and 5.

    Args:
        model_config: the model.
        family: a key of FAMILIES.
        dtype: dtype of the weights, as torch names it.
    """
    shared = {
        "architectures": [FAMILIES[family].architecture],
        "bos_token_id": None,
        "eos_token_id": None,
        "model_type": family,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    return shared | FAMILIES[family].write(model_config)


def check_against(
    from_hf: ModelConfig, configured: ModelConfig, *, explicit: frozenset[str]
) -> ModelConfig:
    """The model to train from a pretrained one: the same, with the free fields as configured.

    Rotary positions may be other ones on the command line, for longer contexts.

    Args:
        from_hf: configuration that config.json describes.
        configured: the model section of the configuration.
        explicit: keys of the section ("moe.router_topk") set on the command line; config.json
            overrides the others.

    Raises:
        HuggingFaceError: an explicit field that contradicts config.json, with both values.
    """
    if "mtp.num_layers" in explicit and not configured.mtp.num_layers:
        # the layers of multi-token prediction in the files are left out
        from_hf = replace(from_hf, mtp=MTPConfig())
        explicit = explicit - {"mtp.num_layers"}
    positions = changed_positions(from_hf, configured, explicit=explicit)
    for key, value in positions.items():
        before = typed(value_of(from_hf, key))
        log_once(f"{KEYS[f'model.{key}'].flag} {typed(value)} for {before} of config.json")
    from_hf = with_values(from_hf, positions)
    free = free_keys(from_hf)
    given = {key: value_of(configured, key) for key in sorted(explicit - set(free))}
    given = {key: value for key, value in given.items() if value is not None}
    if all(from_hf.moe_layers):
        # no layer has an MLP of this width; harmless in training too
        given.pop("ffn_hidden_size", None)
    _check_fields(from_hf, given)
    return with_values(from_hf, {key: value_of(configured, key) for key in free})


def _check_fields(from_hf: ModelConfig, given: Mapping[str, Any]) -> None:
    """Check that the given fields have an effect and agree with config.json."""
    ours = canonical(with_values(from_hf, given))
    theirs = canonical(from_hf)
    for key, value in given.items():
        configured = value_of(ours, key)
        expected = value_of(theirs, key)
        # moe.layer_freq has several spellings
        has_effect = configured == value or key == "moe.layer_freq"
        if configured != expected or not has_effect:
            flag = KEYS[f"model.{key}"].flag
            raise HuggingFaceError(
                f"{flag} {typed(value)} contradicts the pretrained checkpoint",
                why=f"its config.json has {key} = {typed(expected)}",
                fix=f"leave {flag} out, or train without --pretrained-checkpoint",
            )


def _find_family(name: str) -> Family:
    """The family of a model_type; HuggingFaceError for an unknown one."""
    if name in FAMILIES:
        return FAMILIES[name]
    needs = read_tables(MODELS)["unsupported"].get(name)
    if needs:
        why = f"it would need {needs}"
    else:
        why = f"the nearest names are {', '.join(get_close_matches(name, FAMILIES, cutoff=0.0))}"
    raise HuggingFaceError(
        f"Hugging Face model_type {name} is not supported",
        why=why,
        fix=(
            "use a checkpoint of a family of docs/families.md, or derive the row of this one: "
            "nanotrain family add DIR (docs/new_family.md)"
        ),
    )
