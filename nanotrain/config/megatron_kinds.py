"""Kinds of rows of the table of Megatron-LM's flags, `megatron.MEGATRON`.

always     it names what is always so; another value than those listed is an error
no effect  it tunes an implementation that does not exist here; accepted, changes nothing that is computed
rename     it becomes values of fields, by a function of conversions.py
not yet    an error, with the nearest alternative; values that ask for nothing are accepted
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from nanotrain.config.config import Config

Kind = Literal["always", "no effect", "rename", "not yet"]
Conversion = Callable[[Config, str], dict[str, Any]]
MANY = -1  # arity of a flag that takes all arguments up to the next flag


@dataclass(frozen=True)
class MegatronFlag:
    """One flag of Megatron-LM."""

    kind: Kind
    meaning: str  # what it is here; of `not yet`, the cure
    arity: int = 0  # values it takes
    accepts: tuple[str, ...] = ()  # the values that are accepted; empty: all, of `not yet` none
    convert: Conversion | None = None  # of a rename: from the configuration and the value to values by unique name
    fields: tuple[str, ...] = ()  # of a rename: unique names of the fields it always sets
    overrules: bool = False  # of a rename: its values replace those of other flags, as in Megatron-LM
    is_check: bool = False  # of a rename: it depends on what the other flags set, so it is converted last
    saves: bool = False  # of `no effect`: in Megatron-LM it saves time or memory, so the log names it


def always(meaning: str, *accepts: str, arity: int = 0) -> MegatronFlag:
    """A flag that names what is always so."""
    return MegatronFlag("always", meaning, 1 if accepts else arity, accepts)


def no_effect(meaning: str, *, arity: int = 0, saves: bool = False) -> MegatronFlag:
    """A flag that tunes an implementation that does not exist here."""
    return MegatronFlag("no effect", meaning, arity, saves=saves)


def sets(meaning: str, **values: Any) -> MegatronFlag:
    """A flag without a value that stands for values of fields."""
    return MegatronFlag("rename", meaning, convert=lambda config, text: dict(values), fields=tuple(values))


def rename(meaning: str, convert: Conversion) -> MegatronFlag:
    """A flag whose value becomes values of fields."""
    return MegatronFlag("rename", meaning, 1, convert=convert)


def not_yet(cure: str, *accepts: str, arity: int = 0) -> MegatronFlag:
    """A flag of a feature that does not exist."""
    return MegatronFlag("not yet", cure, 1 if accepts else arity, accepts)


FUSED = "fused kernels are chosen by torch"
