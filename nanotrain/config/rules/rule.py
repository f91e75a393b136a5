"""A rule as data, the values that its predicate and texts read, and the check of a table of rules."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import lcm
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.length_schedule import length_schedule
from nanotrain.config.pipeline_layout import count_mtp_layers, read_pipeline_layout
from nanotrain.config.schema import ENTRIES, value_of
from nanotrain.errors import ConfigError, ErrorCollector


class Values:
    """Every field of a configuration by its unique name, and the sizes that several rules read.

    >>> Values(Config()).moe_router_topk, Values(Config()).cp
    (2, 1)
    """

    def __init__(self, config: Config) -> None:
        model, parallel = config.model, config.parallel
        self.config = config
        self.tp, self.cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        self.pp, self.ep = parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
        self.etp = parallel.expert_tensor_parallel_size or self.tp
        # settings of stages without effect on one rank are an error of their own (unused.py)
        self.num_stages = 1 if self.pp == 1 else self.pp * parallel.num_virtual_stages_per_pipeline_rank
        self.has_experts = self.num_experts is not None
        self.num_groups, self.group_topk = self.moe_router_num_groups or 1, self.moe_router_group_topk or 1
        self.experts_per_group = (self.num_experts or 0) // self.num_groups
        self.head_dim, self.query_groups = model.head_dim, model.query_groups
        self.has_rope, self.rotary_dim = model.has_rope, model.rotary_dim
        self.ffn_size, self.moe_ffn_size = model.ffn_size, model.moe_ffn_size
        # 0 without a tokenizer yet: checked again once its size is known (`open_inputs`)
        self.vocab_rows = 0 if model.vocab_size is None else model.padded_vocab_size

    def __getattr__(self, name: str) -> Any:
        if name not in ENTRIES:
            raise AttributeError(name)
        return value_of(self.config, ENTRIES[name].key)

    def __getitem__(self, name: str) -> Any:
        """As an attribute; what `str.format_map` reads."""
        return getattr(self, name)

    @property
    def scalar_rule(self) -> str:
        """The update rule of the parameters that Muon leaves, or of all."""
        return str(self.muon_scalar_optimizer if self.optimizer == "muon" else self.optimizer)

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has no experts."""
        return not all(self.moe_layers)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        return self.config.model.moe_layers

    @property
    def splits_sequence_by_tp(self) -> bool:
        """Whether tensor-parallel ranks split a sequence."""
        return self.tp > 1 and bool(self.sequence_parallel or self.has_experts)

    @property
    def sequence_parts(self) -> int:
        """What seq_length must be a multiple of."""
        chunks = 2 * self.cp if self.cp > 1 else 1
        return lcm(chunks, self.tp * self.cp) if self.splits_sequence_by_tp else chunks

    @property
    def scheduled_lengths(self) -> tuple[int, ...]:
        """Sequence lengths of the schedule; none where it cannot be read, which is an error of its own."""
        try:
            schedule = length_schedule(self.config)
        except ConfigError:
            return ()
        return tuple(schedule.sizes) if schedule else ()

    @property
    def uneven_lengths(self) -> list[int]:
        """Those below seq_length that cannot be split into `sequence_parts`."""
        return [length for length in self.scheduled_lengths[:-1] if length % self.sequence_parts]

    @property
    def window_layers(self) -> tuple[bool, ...]:
        return self.config.model.window_layers

    @property
    def no_rope_layers(self) -> tuple[bool, ...]:
        return self.config.model.no_rope_layers

    @property
    def layout_lengths(self) -> tuple[int, ...] | None:
        """Layers of every stage, where a layout is set."""
        text = self.pipeline_model_parallel_layout
        return None if text is None else read_pipeline_layout(text)

    @property
    def layout_mtp_layers(self) -> int | None:
        """Layers of multi-token prediction in the layout; None where it names none."""
        text = self.pipeline_model_parallel_layout
        return None if text is None else count_mtp_layers(text)

    @property
    def ranks_without_layers(self) -> list[int]:
        """Pipeline ranks between the first and the last to which a layout gives no layers."""
        lengths = self.layout_lengths
        if lengths is None or len(lengths) != self.num_stages:
            return []
        return [rank for rank in range(1, self.pp - 1) if not any(lengths[rank :: self.pp])]

    @property
    def counted_layers(self) -> int:
        """Layers that are split evenly over stages, with those that embedding and head count as."""
        return int(self.num_layers) + (0 if self.pp == 1 else sum(self.config.parallel.counted_ends))

    @property
    def end_lengths(self) -> list[int]:
        """Layers of the first and of the last of several pipeline ranks, where they are set."""
        ends = (self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers)
        return [length for length in ends if length is not None and self.pp > 1]

    @property
    def stages_between(self) -> int:
        """Stages whose length is not set."""
        return (self.pp - len(self.end_lengths)) * (self.num_stages // self.pp)

    @property
    def layers_between(self) -> int:
        """Layers left for the stages whose length is not set."""
        return int(self.num_layers) - sum(self.end_lengths)


Text = str | Callable[[Values], str]


@dataclass(frozen=True)
class Rule:
    """Values that are an error together."""

    fields: str  # unique names of the fields concerned, separated by spaces
    is_broken: Callable[[Values], object]  # the predicate
    what: Text  # the fact; a template of `str.format` over `Values`, or a function of them
    why: Text  # the reason, in the same form
    fix: Text  # the cure, in the same form


def check_rules(
    config: Config, rules: Iterable[Rule], *, errors: ErrorCollector, unreadable: frozenset[str] = frozenset()
) -> None:
    """Check every rule of a table, but those on fields that could not be read; errors are collected."""
    values = Values(config)
    for rule in rules:
        if not unreadable.isdisjoint(rule.fields.split()):
            continue
        with errors:  # a predicate or a text may itself find a pattern of layers invalid
            if rule.is_broken(values):
                texts = (rule.what, rule.why, rule.fix)
                what, why, fix = (t.format_map(values) if isinstance(t, str) else t(values) for t in texts)
                raise ConfigError(what, why=why, fix=fix)
