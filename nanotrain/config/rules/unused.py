"""Fields without effect: which fields another field switches off, and what happens to them.

The rules are in the files `unused_*.py` beside this one; `absent_sections` has
the fields of the sections that a model does not have. Such a setting is an error, with two
exceptions. Where the command line changes the cause, a setting of a YAML file returns to its
default (`+config=tiny --data-parallel-sharding-strategy no_shard`, where tiny overlaps the
parameter gather). What published scripts of Megatron-LM set without effect (`is_harmless`) returns
to its default in any case. `nanotrain config --explain` names the reason.

reset_unused   the configuration without them, and the errors
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.option import Entry
from nanotrain.config.rules import unused_heads, unused_layout, unused_model, unused_run
from nanotrain.config.rules.settings import Settings, Unused, UnusedFields
from nanotrain.config.schema import (
    ENTRIES,
    KEYS,
    argument_of,
    entries_of,
    flat_values,
    typed,
    value_of,
    walk_sections,
    with_values,
    without_absent,
)
from nanotrain.errors import ConfigError, ErrorCollector

# after the sections that a model does not have; a function reads fields that earlier ones reset
UNUSED: tuple[Callable[[Settings], UnusedFields], ...] = (
    unused_model.unused_positions,
    unused_model.unused_query_scale,
    unused_model.unused_floor_scale,
    unused_model.unused_gates,
    unused_model.unused_rope_scaling,
    unused_model.unused_linear_attention,
    unused_model.unused_mamba,
    unused_heads.unused_heads,
    unused_model.unused_query_norms,
    unused_model.unused_mup,
    unused_model.unused_position_ids,
    unused_model.unused_residual,
    unused_model.unused_blocks,
    unused_model.unused_with_compressed_keys,
    unused_model.unused_with_mla,
    unused_model.unused_checkpoint_args,
    unused_model.unused_expert_axes,
    unused_model.unused_mlp_width,
    unused_model.unused_router,
    unused_model.unused_router_scores,
    unused_layout.unused_sharding,
    unused_layout.unused_axes,
    unused_layout.unused_stages,
    unused_layout.unused_recomputation,
    unused_run.unused_graph_settings,
    unused_run.unused_final_decay,
    unused_run.unused_schedule,
    unused_run.unused_schedule_steps,
    unused_run.unused_warmup_steps,
    unused_run.unused_warmup_rate,
    unused_layout.unused_optimizer,
    unused_layout.unused_muon,
    unused_layout.unused_moments,
    unused_layout.unused_weight_decay,
    unused_layout.unused_loss_scale,
    unused_layout.unused_fp8,
    unused_layout.unused_fp8_layers,
    unused_run.unused_corpora,
    unused_run.unused_splits,
    unused_run.unused_tokenizer,
    unused_run.unused_saving,
    unused_run.unused_trackers,
)
# fields of absent sections that published scripts of Megatron-LM set
HARMLESS = {
    "rotary_scaling_factor",
    "yarn_correction_range_round_to_int",
    "mscale",
    "mscale_all_dim",
    "first_last_layers_bf16",
}


@dataclass(frozen=True)
class OptionalSection:
    """A section that a model may not have."""

    switch: Entry  # the field without which it is absent
    value: str  # the value of the switch with which it is present; empty: any
    fields: tuple[str, ...]  # unique names, without the switch

    def is_absent(self, config: Config) -> bool:
        """Whether a configuration does not have the section."""
        value = value_of(config, self.switch.key)
        return bool(value != self.value) if self.value else not value

    def unused(self, *, is_harmless: bool) -> Unused:
        """The fields of the absent section: the fields in `HARMLESS`, or all other fields."""
        why = f"it belongs to {self.switch.name} {self.value}".rstrip()
        if self.switch.is_optional:
            why += ", which is unset"
        return Unused(
            tuple(name for name in self.fields if (name in HARMLESS) is is_harmless),
            causes=(self.switch.name,),
            why=why,
            fix=f"set {self.switch.flag} {self.value}".rstrip(),
            is_harmless=is_harmless,
        )


@cache
def optional_sections() -> tuple[OptionalSection, ...]:
    """The sections that a model may not have."""
    sections = []
    for section, field, _ in walk_sections():
        name = field.metadata["switch"]
        if name:
            parent = section.rpartition(".")[0]
            switch = KEYS.get(f"{section}.{name}") or KEYS[f"{parent}.{name}"]
            names = tuple(entry.name for entry in entries_of(section) if entry is not switch)
            sections.append(OptionalSection(switch, field.metadata["value"], names))
    return tuple(sections)


def absent_sections(c: Settings) -> UnusedFields:
    """The fields of the sections that a model does not have."""
    for section in optional_sections():
        if section.is_absent(c.config):
            # two rows: fields that are an error if they are set, and fields that are reset
            yield section.unused(is_harmless=False)
            yield section.unused(is_harmless=True)


@dataclass
class Reset:
    """A configuration whose fields without effect return to their defaults one after another.

    Args:
        config: the composed configuration, then the one with the values that were reset.
        explicit: keys set on the command line.
        defaults: keys whose value is a default of Megatron-LM, which no one set.
        errors: collects a ConfigError per setting that is refused.
        changed: values by unique name of the fields that do not have their defaults.
        origins: the origin of each value that was reset, by key.
    """

    config: Config
    explicit: frozenset[str]
    defaults: frozenset[str]
    errors: ErrorCollector
    changed: dict[str, Any]
    origins: dict[str, str]

    def apply(self, row: Unused) -> None:
        """Reset fields without effect to their default, or add an error where the user set them.

        A field that only a recipe set is reset if the user overruled one of the rule's causes.
        """
        is_overruled = any(ENTRIES[cause].key in self.explicit for cause in row.causes)
        for name in row.fields:
            if name not in self.changed:
                continue
            entry = ENTRIES[name]
            is_explicit = entry.key in self.explicit
            if row.is_harmless or entry.key in self.defaults or (is_overruled and not is_explicit):
                self._reset(entry, why=row.why)
            else:
                self.errors.errors.append(without_effect(self.config, entry, row=row))

    def _reset(self, entry: Entry, *, why: str) -> None:
        """Return one field to its default, and note its origin."""
        source = "the command line" if entry.key in self.explicit else "the YAML"
        if entry.key in self.defaults:
            source = "Megatron-LM"
        value = typed(self.changed.pop(entry.name))
        self.config = with_values(self.config, {entry.key: entry.default})
        self.origins[entry.key] = f"default, not {source}'s {value}: {why}"


def reset_unused(
    config: Config,
    *,
    explicit: frozenset[str],
    errors: ErrorCollector,
    defaults: frozenset[str] = frozenset(),
    unreadable: frozenset[str] = frozenset(),
) -> tuple[Config, dict[str, str]]:
    """Reset settings of YAML files to their defaults where the command line switched them off.

    Args:
        config: the composed configuration.
        explicit: keys set on the command line.
        errors: collects a ConfigError per setting without effect that the command line did not
            switch off.
        defaults: keys whose value is a default of Megatron-LM, which no one set; they are reset
            too.
        unreadable: unique names of fields whose value could not be read; rules with such a cause
            are left out.

    Returns:
        The configuration, and the origin of each value that was reset.
    """
    values = flat_values(config)
    changed = {
        name: values[entry.key]
        for name, entry in ENTRIES.items()
        if values[entry.key] != entry.default
    }
    reset = Reset(config, explicit, defaults, errors, changed, origins={})
    for rules in (absent_sections, *UNUSED):
        with errors:  # a rule may find that a pattern of layers is invalid
            for row in rules(Settings(reset.config)):
                if is_decided(config, row, unreadable=unreadable):
                    reset.apply(row)
    config = reset.config
    return without_absent(config) if config.is_model_known else config, reset.origins


def is_decided(config: Config, row: Unused, *, unreadable: frozenset[str]) -> bool:
    """Whether the values of all causes are known.

    The model section may be read later, from a checkpoint or from config.json of pretrained
    weights.
    """
    if not unreadable.isdisjoint(row.causes):
        return False
    is_of_model = any(ENTRIES[cause].key.startswith("model.") for cause in row.causes)
    return config.is_model_known or not is_of_model


def without_effect(config: Config, entry: Entry, *, row: Unused) -> ConfigError:
    """The error for a setting without effect."""
    value = value_of(config, entry.key)
    causes = [ENTRIES[cause] for cause in row.causes]
    change = f"change {' or '.join(cause.flag for cause in causes)}"
    if len(causes) == 1 and causes[0].kind is bool:
        change = f"set {argument_of(causes[0].name, not value_of(config, causes[0].key))}"
    flag = argument_of(entry.name, value) if entry.kind is bool else entry.flag
    return ConfigError(
        f"{entry.key} = {typed(value)} has no effect",
        why=row.why,
        fix=f"leave {flag} out or {row.fix or change}",
    )
