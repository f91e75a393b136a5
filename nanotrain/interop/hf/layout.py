"""config.json as tables: the layout of a family.

Layout, Part   config.json <-> values of the model section, by key ("moe.router_topk")
reject         the error for an unsupported feature
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nanotrain.config.model import ModelConfig
from nanotrain.config.schema import flat_values
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.canonical import resolved
from nanotrain.interop.hf.config_class import Entries, pass_over
from nanotrain.interop.hf.tables import read_tables
from nanotrain.untrusted import shown, whole_number

Values = dict[str, Any]
Raw = dict[str, Any]  # a parsed config.json
# largest numbers of items that are listed one by one
COUNTED = {
    "num_layers": 1000,
    "moe.num_experts": 4096,
    "mtp.num_layers": 100,
    "all experts": 1 << 17,
}
# Entries that may be null. Others are written as 0 for a model without the feature, and reading
# them back gives another model.
NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping", "moe_latent_size", "q_lora_rank")


def reject(key: str, value: Any, *, instead: str) -> NoReturn:
    """Raise for an entry of config.json; `instead` is its supported value."""
    raise HuggingFaceError(
        f"config.json has {key}: {shown(value)}",
        why=(
            f"only {instead} is supported; "
            "weights trained with another setting would compute something else"
        ),
        fix=f"choose a checkpoint whose {key} is {instead}",
    )


def _check_one_expert(values: Values) -> None:
    """Refuse one expert per token where transformers makes the one weight 1."""
    is_sigmoid = values.get("moe.router_score_function") == "sigmoid"
    keeps_scores = values.get("moe.apply_probs_on_input", False)
    if is_sigmoid and values.get("moe.router_topk") == 1 and not keeps_scores:
        reject("num_experts_per_tok", 1, instead="above 1")


@dataclass(frozen=True)
class Part:
    """Entries that a table cannot express."""

    # config.json, with defaults -> values of the model section by key
    read: Callable[[Raw], Values] = lambda raw: {}
    # model -> entries
    write: Callable[[ModelConfig], Values] = lambda model_config: {}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The config.json of a family; writing and reading back shows settings that it lacks."""

    entries: Mapping[str, str]  # entry -> the key of the model section with its value
    # values of transformers for entries that config.json leaves out
    defaults: dict[str, Any] = field(default_factory=dict)
    # supported values; the first is written
    required: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # values of the model section that all models of the family have
    fixed: Values = field(default_factory=dict)
    # entries that describe no weights: written and not read
    written: Values = field(default_factory=dict)
    # entries that tables and parts have under another name -> their name in the files
    renamed: Mapping[str, str] = field(default_factory=dict)
    parts: Sequence[Part] = ()
    # entries that the code of the family does not use, read without effect
    passed_over: Sequence[str] = ()

    def read(self, raw: Raw) -> Values:
        """The values of the model section by key.

        Raises:
            HuggingFaceError: an unsupported feature.
        """
        entries = self._complete(raw)
        self._check_counts(entries)
        self._check_required(entries)
        pass_over(entries, *self.passed_over)
        values = {key: entries[entry] for entry, key in self.entries.items() if entry in entries}
        if not values.get("moe.num_experts", True):
            reject("num_experts", values["moe.num_experts"], instead="above 0")
        values["untie_embeddings_and_output_weights"] = not entries.get(
            "tie_word_embeddings", False
        )
        for part in self.parts:
            values |= part.read(entries)
        has_experts = values.get("moe.num_experts") is not None
        values |= self.fixed
        if has_experts:
            _check_one_expert(values)
            return values
        return {key: value for key, value in values.items() if not key.startswith("moe.")}

    def _complete(self, raw: Raw) -> Raw:
        """The entries with defaults, and under the names that the tables have for them."""
        complete: Values = self.defaults | raw
        synonyms = {
            name: synonym
            for name, synonym in read_tables()["synonyms"]
            if synonym in raw and name not in raw
        }
        for names in (synonyms, self.renamed):
            complete |= {entry: complete[name] for entry, name in names.items() if name in complete}
        read = raw.was_read if isinstance(raw, Entries) else None
        return Entries(complete, names=synonyms | dict(self.renamed), read=read)

    def _check_counts(self, raw: Raw) -> None:
        for entry, key in self.entries.items():
            if key in COUNTED and raw.get(entry) is not None:
                whole_number(raw[entry], entry, high=COUNTED[key])

    def _check_required(self, raw: Raw) -> None:
        """Check the entries with few supported values; null is false, a missing one the first."""
        for key, supported in self.required.items():
            value = raw.get(key, supported[0])
            is_absent = not value and not supported[0]
            if value not in supported and not is_absent:
                reject(key, value, instead=str(supported[0]).lower())

    def write(self, model_config: ModelConfig) -> Values:
        """The entries of a model."""
        values = flat_values(resolved(model_config))
        entries = {name: supported[0] for name, supported in self.required.items()}
        entries |= self.written
        for entry, key in self.entries.items():
            value = values.get(key)
            if value is None and entry not in NULLABLE:
                value = 0
            entries[entry] = value
        entries["tie_word_embeddings"] = not model_config.untie_embeddings_and_output_weights
        for part in self.parts:
            entries |= part.write(model_config)
        return {self.renamed.get(entry, entry): value for entry, value in entries.items()}
