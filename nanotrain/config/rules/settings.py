"""What the rules read, the sections of a configuration and sizes that follow; what they return.

Settings          all sections; absent ones have their defaults
ReadableSection   a section of which some fields could not be read
Errors            mistakes, from rules of settings
UnusedFields      fields without effect, from rules of these; `unused` makes one
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from nanotrain.config.config import Config, Fp8Config
from nanotrain.config.layer_kinds import (
    LINEAR_ATTENTION,
    CompressedAttentionConfig,
    DSAConfig,
    LinearAttentionConfig,
    LinearAttentionKind,
)
from nanotrain.config.model import LongRopeConfig, MLAConfig, MoEConfig, YarnConfig
from nanotrain.config.schema import ENTRIES, SECTIONS
from nanotrain.errors import ConfigError

Errors = Iterator[ConfigError]  # what a function of rules returns: one error per broken rule


@dataclass(frozen=True)
class Unused:
    """Fields that have no effect."""

    fields: tuple[str, ...]  # their unique names
    causes: tuple[str, ...]  # unique names of the fields that decide
    why: str  # the reason
    fix: str = ""  # how the fields get an effect; empty: change the causes
    # published scripts of Megatron-LM set the fields all the same: reset, not refused
    is_harmless: bool = False


UnusedFields = Iterator[Unused]  # what a function of rules returns


def unused(
    *fields: str, by: str | tuple[str, ...], why: str, fix: str = "", is_harmless: bool = False
) -> Unused:
    """Fields without effect, switched off `by` another field, or by several together."""
    causes = (by,) if isinstance(by, str) else by
    return Unused(fields, causes, why, fix=fix, is_harmless=is_harmless)


class Unreadable(Exception):
    """A rule reads a field whose text could not be read, which is an error of its own."""


class ReadableSection:
    """A section of which some fields could not be read.

    Reading such a field, or a size that follows from several fields, raises `Unreadable`.
    """

    def __init__(self, section: Any, unreadable: set[str]) -> None:
        self._section = section
        self._readable = {field.name for field in fields(section)} - unreadable

    def __getattr__(self, name: str) -> Any:
        if name not in self._readable:
            raise Unreadable(name)
        return getattr(self._section, name)


class Settings:
    """The sections of a configuration; absent ones have their defaults.

    >>> Settings(Config()).moe.router_topk, Settings(Config()).etp
    (2, 1)

    Args:
        config: the configuration.
        unreadable: unique names of fields that could not be read, which have their defaults.
    """

    def __init__(self, config: Config, unreadable: frozenset[str] = frozenset()) -> None:
        model = config.model
        precision = config.precision
        self.config = config
        self.model = model
        self.yarn = model.yarn or YarnConfig()
        self.longrope = model.longrope or LongRopeConfig()
        self.linear = model.linear_attention or LinearAttentionConfig()
        self.mamba = model.mamba
        self.dsa = model.dsa or DSAConfig()
        self.compressed = model.compressed or CompressedAttentionConfig()
        self.mla = model.mla or MLAConfig()
        self.moe = model.moe or MoEConfig()
        self.mtp = model.mtp
        self.parallel = config.parallel
        self.memory = config.memory
        self.precision = precision
        self.fp8 = precision.fp8 or Fp8Config()
        self.optim = config.optim
        self.data = config.data
        self.checkpoint = config.checkpoint
        self.train = config.train
        self._hide(unreadable)

    def _hide(self, unreadable: frozenset[str]) -> None:
        """Make fields unreadable, and with one of the model all sizes that follow from it."""
        hidden: dict[str, set[str]] = {}
        for entry in (ENTRIES[name] for name in unreadable):
            hidden.setdefault(ATTRIBUTES[entry.section], set()).add(entry.field.name)
            if entry.section.startswith("model."):
                hidden.setdefault("model", set())
        for attribute, names in hidden.items():
            setattr(self, attribute, ReadableSection(getattr(self, attribute), names))

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.parallel.tensor_model_parallel_size

    @property
    def cp(self) -> int:
        """Context-parallel ranks."""
        return self.parallel.context_parallel_size

    @property
    def pp(self) -> int:
        """Pipeline-parallel ranks."""
        return self.parallel.pipeline_model_parallel_size

    @property
    def ep(self) -> int:
        """Expert-parallel ranks."""
        return self.parallel.expert_model_parallel_size

    @property
    def etp(self) -> int:
        """Tensor-parallel ranks of the experts."""
        return self.parallel.expert_tensor_parallel_size or self.tp

    @property
    def has_experts(self) -> bool:
        """Whether `num_experts` is set; a section that is not complete has none."""
        num_experts: int | None = self.moe.num_experts
        return num_experts is not None

    @property
    def has_fp8(self) -> bool:
        """Whether `fp8_format` is set."""
        format: str | None = self.fp8.format
        return format is not None

    @cached_property
    def mixers(self) -> tuple[str | None, ...]:
        """`ModelConfig.mixers`: the kind of token mixer of each layer."""
        return self.model.mixers

    @cached_property
    def linear_kinds(self) -> dict[str, LinearAttentionKind]:
        """The kinds of layers in place of attention that the model has, by name."""
        return {name: kind for name, kind in LINEAR_ATTENTION.items() if name in self.mixers}

    @property
    def has_mamba(self) -> bool:
        """Whether a layer has Mamba-2."""
        return any(kind.has_mamba for kind in self.linear_kinds.values())

    @property
    def has_linear_layers(self) -> bool:
        """Whether a layer is of the kind `linear_attention_type`."""
        return self.model.linear_attention_type in self.mixers

    @property
    def has_delta_rule(self) -> bool:
        """Whether a layer is Gated DeltaNet or KDA, with key and value heads of its own."""
        return any(kind.has_delta_rule for kind in self.linear_kinds.values())

    @property
    def num_window_tokens(self) -> int:
        """Tokens before its own that attention with compressed keys reads at once; 0 without it."""
        if self.model.compressed is None:
            return 0
        counts = [self.model.window_size or 0]
        if "csa" in self.mixers:
            counts.append(2 * self.compressed.sparse_ratio - 1)
        if "hca" in self.mixers:
            counts.append(self.compressed.heavy_ratio - 1)
        return max(counts)

    @property
    def has_dense_layers(self) -> bool:
        """Whether a layer has a dense MLP."""
        return "dense" in self.model.mlps or self.moe.shortcut

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """The modules that selective recomputation computes again."""
        if self.memory.recompute_granularity is None:
            return ()
        return self.config.memory.recomputed_modules


# attributes of `Settings` by the dotted names of the sections
ATTRIBUTES = {section: section.rpartition(".")[2] for section in SECTIONS}
ATTRIBUTES["model.linear_attention"] = "linear"
