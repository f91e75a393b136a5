"""A rule as data, the values that its predicate and texts read, and the check of a table of rules."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from math import lcm
from operator import gt, lt
from typing import Any

from nanotrain.config.config import Config, ModelConfig
from nanotrain.config.notation import count_mtp_layers, read_pipeline_layout
from nanotrain.config.schedules import length_schedule
from nanotrain.config.schema import ENTRIES, typed, value_of
from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError, ErrorCollector


class Unreadable(Exception):
    """A rule reads a field whose text could not be read, which is an error of its own."""


class Values:
    """Every field of a configuration by its unique name, and the sizes that several rules read (SIZES).

    >>> Values(Config()).moe_router_topk, Values(Config()).cp
    (2, 1)
    """

    def __init__(self, config: Config, unreadable: frozenset[str] = frozenset()) -> None:
        self.config, self._unreadable = config, unreadable
        self._has_model = all(ENTRIES[name].section.partition(".")[0] != "model" for name in unreadable)

    def __getattr__(self, name: str) -> Any:
        if name in self._unreadable:
            raise Unreadable(name)
        if name in SIZES:
            return SIZES[name](self)
        if name not in ENTRIES:
            raise AttributeError(name)
        return value_of(self.config, ENTRIES[name].key)

    def __getitem__(self, name: str) -> Any:
        """As an attribute; what `str.format_map` reads."""
        return getattr(self, name)

    @property
    def model(self) -> ModelConfig:
        """The model section, whose sizes depend on each other."""
        if not self._has_model:
            raise Unreadable("model")
        return self.config.model

    @property
    def sequence_parts(self) -> int:
        """What seq_length must be a multiple of."""
        chunks = 2 * self.cp if self.cp > 1 else 1
        return lcm(chunks, self.tp * self.cp) if self.splits_sequence_by_tp else chunks

    @property
    def uneven_lengths(self) -> list[int]:
        """Lengths of the schedule below seq_length that cannot be split into `sequence_parts`."""
        if not self.step_seq_length_schedule:
            return []
        try:
            schedule = length_schedule(self.config)
        except ConfigError:  # of the schedule itself
            return []
        lengths = schedule.sizes[:-1] if schedule else ()
        return [length for length in lengths if length % self.sequence_parts]

    @property
    def ranks_without_layers(self) -> list[int]:
        """Pipeline ranks between the first and the last to which a layout gives no layers."""
        lengths = self.layout_lengths
        if lengths is None or len(lengths) != self.num_stages:
            return []
        return [rank for rank in range(1, self.pp - 1) if not any(lengths[rank :: self.pp])]

    @property
    def end_lengths(self) -> list[int]:
        """Layers of the first and of the last of several pipeline ranks, where they are set."""
        ends = (self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers)
        return [length for length in ends if length is not None and self.pp > 1]


SIZES: dict[str, Callable[[Values], Any]] = {
    "tp": lambda v: v.tensor_model_parallel_size,
    "cp": lambda v: v.context_parallel_size,
    "pp": lambda v: v.pipeline_model_parallel_size,
    "ep": lambda v: v.expert_model_parallel_size,
    "etp": lambda v: v.expert_tensor_parallel_size or v.tp,
    # settings of stages without effect on one rank are an error of their own (unused.py)
    "num_stages": lambda v: 1 if v.pp == 1 else v.pp * v.num_virtual_stages_per_pipeline_rank,
    "has_experts": lambda v: v.num_experts is not None,
    "num_groups": lambda v: v.moe_router_num_groups or 1,
    "group_topk": lambda v: v.moe_router_group_topk or 1,
    "experts_per_group": lambda v: (v.num_experts or 0) // v.num_groups,
    "head_dim": lambda v: v.model.head_dim,
    "query_groups": lambda v: v.model.query_groups,
    "has_rope": lambda v: v.model.has_rope,
    "rotary_dim": lambda v: v.model.rotary_dim,
    "ffn_size": lambda v: v.model.ffn_size,
    "moe_ffn_size": lambda v: v.model.moe_ffn_size,
    # 0 without a tokenizer yet: checked again once its size is known (`open_inputs`)
    "vocab_rows": lambda v: 0 if v.vocab_size is None else v.model.padded_vocab_size,
    "moe_layers": lambda v: v.model.moe_layers,
    "window_layers": lambda v: v.model.window_layers,
    "no_rope_layers": lambda v: v.model.no_rope_layers,
    "has_dense_layers": lambda v: not all(v.moe_layers),
    "recomputed_modules": lambda v: v.recompute_granularity and v.config.memory.recomputed_modules or (),
    "splits_sequence_by_tp": lambda v: v.tp > 1 and bool(v.sequence_parallel or v.has_experts),
    # layers of every stage, and layers of multi-token prediction, in the layout; None where there are none
    "layout_lengths": lambda v: (text := v.pipeline_model_parallel_layout) and read_pipeline_layout(text),
    "layout_mtp_layers": lambda v: (text := v.pipeline_model_parallel_layout) and count_mtp_layers(text),
    # layers that are split evenly over stages, with those that embedding and head count as
    "counted_layers": lambda v: v.num_layers + (0 if v.pp == 1 else sum(v.config.parallel.counted_ends)),
    # stages whose length is not set, and the layers left for them
    "stages_between": lambda v: (v.pp - len(v.end_lengths)) * (v.num_stages // v.pp),
    "layers_between": lambda v: v.num_layers - sum(v.end_lengths),
    "reduces_in_fp32": lambda v: v.params_dtype.value == "fp32" or v.config.precision.accumulates_grads_in_fp32,
    # the update rule of the parameters that Muon leaves, or of all
    "scalar_rule": lambda v: v.muon_scalar_optimizer if v.optimizer == "muon" else v.optimizer,
}

Text = str | Callable[[Values], str]


@dataclass(frozen=True)
class Rule:
    """Values that are an error together."""

    is_broken: Callable[[Values], object]  # the predicate
    what: Text  # the fact; a template of `str.format` over `Values`, or a function of them
    why: Text  # the reason, in the same form
    fix: Text  # the cure, in the same form


def holds(values: Values, where: str) -> bool:
    """Whether a condition of a table holds; config/tables/contradictions.yaml describes the form."""
    return any(all(_is_met(values, term) for term in terms.split(" and ")) for terms in where.split(" or "))


def _is_met(values: Values, term: str) -> bool:
    """Whether one term of a condition holds.

    >>> _is_met(Values(Config()), "optimizer is not sgd, lion"), _is_met(Values(Config()), "min_lr is above lr")
    (True, False)
    """
    name, _, expected = term.partition(" is ")
    is_negated, expected = expected.startswith("not "), expected.removeprefix("not ")
    word, _, bound = expected.partition(" ")
    if word not in COMPARISONS:
        return (typed(values[name]) in expected.split(", ")) != is_negated
    value, limit = values[name], values[bound] if bound.isidentifier() else float(bound)
    return None not in (value, limit) and COMPARISONS[word](value, limit) != is_negated


COMPARISONS = {"above": gt, "below": lt}


@cache
def contradictions(group: str) -> tuple[Rule, ...]:
    """The rules of a group of contradictions.yaml: model, run or layout."""
    rows = read_table("contradictions")[group]
    return tuple(Rule(partial(holds, where=row["where"]), row["what"], row["why"], row["fix"]) for row in rows)


def check_rules(
    config: Config, rules: Iterable[Rule], *, errors: ErrorCollector, unreadable: frozenset[str] = frozenset()
) -> None:
    """Check every rule of a table, but those on fields that could not be read; errors are collected."""
    values = Values(config, unreadable)
    for rule in rules:
        with errors, suppress(Unreadable):  # a predicate or a text may itself find a pattern of layers invalid
            if rule.is_broken(values):
                texts = (rule.what, rule.why, rule.fix)
                what, why, fix = (t.format_map(values) if isinstance(t, str) else t(values) for t in texts)
                raise ConfigError(what, why=why, fix=fix)
