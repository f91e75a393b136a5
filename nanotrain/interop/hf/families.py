"""Hugging Face families, and ModelConfig to and from their config.json.

A family can represent a model exactly if writing its config.json and reading it back gives the same
model, so no feature is lost. docs/new_family.md shows how to add a family: one row of
families.yaml.

    FAMILIES, load_families                 the families, from the tables of families.yaml
    config_from_hf, model_from_hf           config.json -> ModelConfig
    family_of, config_to_hf                 ModelConfig -> config.json
    check_against                           checks the configured model against a pretrained checkpoint
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nanotrain.config.model import ModelConfig, MTPConfig
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
from nanotrain.interop.hf.canonical import canonical, free_keys
from nanotrain.interop.hf.layout import COUNTED, Layout
from nanotrain.interop.hf.names import HFName, Naming
from nanotrain.interop.hf.parts import PARTS
from nanotrain.interop.hf.tables import MODELS, TABLES, read_tables
from nanotrain.interop.hf.weights import has_mtp_weights
from nanotrain.untrusted import (
    object_of,
    own_file,
    parse_json,
    read_file,
    shown,
    unreadable,
    whole_number,
)

MAX_CONFIG_BYTES = 1 << 24  # those of models have 1 to 20 kB


@dataclass(frozen=True, kw_only=True)
class Family(Layout, Naming):
    """One `model_type` of Hugging Face: its config.json, and the names of its tensors."""

    architecture: str  # class name in config.json
    # of every tensor but the head; files of the base model without a head omit it
    prefix: str = "model."
    # patterns of names that are no weights of the model (buffers in old files)
    ignored: Sequence[str] = ()
    # files may have layers beyond the model's, for multi-token prediction that is left out
    ignores_later_layers: bool = False

    @property
    def namings(self) -> tuple[Naming, ...]:
        """The names that files may have; the first ones are written."""
        return self, *(
            replace(self, layers={**self.layers, **other}) for other in self.other_layers
        )


def load_families(path: Path = TABLES) -> dict[str, Family]:
    """The families of a file such as families.yaml, which describes the tables and whose rows
    others may start from.
    """
    rows = {name: row for file in (TABLES, path) for name, row in _rows(read_tables(file)).items()}
    return {name: _family_of_row(_complete(name, rows)) for name in read_tables(path)["families"]}


def _rows(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {**tables.get("shared", {}), **tables["families"]}


def _complete(name: str, rows: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the tables and lists of the rows that it starts from, in front of its own."""
    row = dict(rows[name])
    bases = row.pop("from", [])
    complete: dict[str, Any] = {}
    for part in [
        *(_complete(base, rows) for base in ([bases] if isinstance(bases, str) else bases)),
        row,
    ]:
        for key, value in part.items():
            if isinstance(value, dict):
                complete[key] = complete.get(key, {}) | value
            else:
                complete[key] = complete.get(key, []) + value if isinstance(value, list) else value
    return complete


def _family_of_row(row: dict[str, Any]) -> Family:
    row["fixed"] = {
        key: convert(KEYS[f"model.{key}"], value) for key, value in row.get("fixed", {}).items()
    }
    row["required"] = {entry: values for entry, values in row.get("required", {}).items() if values}
    row["parts"] = [PARTS[name] for name in row["parts"]]
    row["layers"], *row["other_layers"] = (
        {
            module: HFName(**(name if isinstance(name, dict) else {"name": name}))
            for module, name in table.items()
        }
        for table in (row["layers"], *row.get("other_layers", []))
    )
    return Family(**row)


# A model is exported as the first family that can represent it.
FAMILIES: dict[str, Family] = load_families()


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the model configuration of a parsed config.json.

    Raises:
        HuggingFaceError: an unsupported family or feature.

    >>> config_from_hf({"model_type": "gpt2", "n_embd": 96, "n_head": 3}).hidden_size
    96
    """
    family = _family(str(raw.get("model_type", "(none)")))
    try:
        # With the bounds of a configuration: a size may be text, negative or a fraction in a
        # damaged file.
        return without_absent(config_from_dict({"model": nest(_checked(family.read(raw)))}).model)
    except (ConfigError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        what = "config.json has an entry that describes no model"
        raise HuggingFaceError(what, why=why, fix="fetch the folder again") from None


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Values of the model section as JSON has them: numbers are no text, and what is counted is
    bounded.
    """
    for key, value in values.items():
        if isinstance(value, str) and KEYS[f"model.{key}"].item in (int, float):
            raise ValueError(f"{key} is {shown(value)}, it must be a number")
    for key in COUNTED.keys() & values.keys():
        whole_number(values[key] or 0, key, high=COUNTED[key])
    layers, experts = (values.get(key) or 0 for key in ("num_layers", "moe.num_experts"))
    whole_number(layers * experts, "layers x experts", high=COUNTED["all experts"])
    return values


def model_from_hf(folder: Path) -> ModelConfig:
    """Read the model configuration of a Hugging Face folder; see `config_from_hf`.

    Layers of multi-token prediction that config.json names and the files lack are left out:
    transformers writes such folders.
    """
    model_config = config_from_hf(read_config(folder))
    if model_config.mtp.num_layers and not has_mtp_weights(folder):
        return replace(model_config, mtp=MTPConfig())
    return model_config


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder; of a model that sees images too, that of its text model.

    Raises:
        HuggingFaceError: no such folder, no config.json, or not a JSON object.
    """
    raw = read_full_config(folder)
    text = raw["text_config"] if isinstance(raw.get("text_config"), dict) else {}
    kind, of_text = str(raw.get("model_type")), str(text.get("model_type"))
    if kind in FAMILIES or of_text not in FAMILIES:
        return raw
    shared = {key: raw[key] for key in ("quantization_config", "tie_word_embeddings") if key in raw}
    return shared | text | {"architectures": [FAMILIES[of_text].architecture]}


def read_full_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder as it is; see `read_config`."""
    path = folder / "config.json"
    try:
        return object_of(
            parse_json(read_file(own_file(path), most=MAX_CONFIG_BYTES), allow_nan=True), "it"
        )
    except (OSError, ValueError) as error:
        fix = "give a folder as `save_pretrained` writes it, with config.json and *.safetensors"
        raise HuggingFaceError(f"cannot read {path}", why=unreadable(error), fix=fix) from None


def family_of(model_config: ModelConfig, *, name: str | None = None) -> str:
    """The family a model is exported as: `name`, or the first of FAMILIES that can represent the
    model.

    Raises:
        HuggingFaceError: `name` is unknown, or no family (of that name) can represent the model.
    """
    families = FAMILIES if name is None else {name: _family(name)}
    lost: dict[str, list[str]] = {}
    free = {*free_keys(model_config)} - {"init_method_std"}
    values = {
        key: value for key, value in flat_values(canonical(model_config)).items() if key not in free
    }
    for candidate, family in families.items():
        lost[candidate] = _lost_fields(model_config, family, values=values)
        if not lost[candidate]:
            return candidate
    reasons = "; ".join(
        f"{candidate} cannot represent {', '.join(missing)}" for candidate, missing in lost.items()
    )
    raise HuggingFaceError(
        "this model cannot be written as a Hugging Face model",
        why=reasons,
        fix="export models of these families only, or add a family (docs/new_family.md)",
    )


def config_to_hf(
    model_config: ModelConfig, *, family: str, dtype: str = "float32"
) -> dict[str, Any]:
    """The config.json of a model that `family` can represent, as transformers 4 and 5 read it;
    `dtype` as in torch.
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
    """The model to train from a pretrained checkpoint: its own, with the free fields as configured.

    Args:
        from_hf: configuration that config.json describes.
        configured: the model section of the configuration.
        explicit: keys of the section ("moe.router_topk") set on the command line; config.json
            overrides the others.

    Raises:
        HuggingFaceError: an explicit field that contradicts config.json, with both values.
    """
    if "mtp.num_layers" in explicit and not configured.mtp.num_layers:
        # leaves the layers of the files out
        from_hf, explicit = replace(from_hf, mtp=MTPConfig()), explicit - {"mtp.num_layers"}
    free = free_keys(from_hf)
    given = {key: value_of(configured, key) for key in sorted(explicit - set(free))}
    given = {key: value for key, value in given.items() if value is not None}
    if all(from_hf.moe_layers):
        # the width of an MLP that no layer has; harmless in training too
        given.pop("ffn_hidden_size", None)
    ours, theirs = canonical(with_values(from_hf, given)), canonical(from_hf)
    for key, value in given.items():
        configured_value, expected = value_of(ours, key), value_of(theirs, key)
        # which has several spellings
        has_no_effect = configured_value != value and key != "moe.layer_freq"
        if configured_value != expected or has_no_effect:
            flag = KEYS[f"model.{key}"].flag
            raise HuggingFaceError(
                f"{flag} {typed(value)} contradicts the pretrained checkpoint",
                why=f"its config.json has {key} = {typed(expected)}",
                fix=f"leave {flag} out, or train without --pretrained-checkpoint",
            )
    return with_values(from_hf, {key: value_of(configured, key) for key in free})


def _lost_fields(
    model_config: ModelConfig, family: Family, *, values: Mapping[str, Any]
) -> list[str]:
    """What a family cannot represent; `values` are those of the canonical model that depend on the
    weights.
    """
    if "moe.num_experts" in family.entries.values() and not value_of(
        model_config, "moe.num_experts"
    ):
        return ["a model without experts"]
    try:
        back = with_values(ModelConfig(), family.read(family.write(model_config)))
    except HuggingFaceError as error:
        return [error.what]
    theirs = flat_values(canonical(back))
    return [key for key, value in values.items() if value != theirs[key]]


def _family(name: str) -> Family:
    if name in FAMILIES:
        return FAMILIES[name]
    needs = read_tables(MODELS)["unsupported"].get(name)
    known = f"the nearest names are {', '.join(get_close_matches(name, FAMILIES, cutoff=0.0))}"
    raise HuggingFaceError(
        f"Hugging Face model_type {name} is not supported",
        why=f"it would need {needs}" if needs else known,
        fix="use a checkpoint of a family of docs/families.md, or add the family (docs/new_family.md)",
    )
