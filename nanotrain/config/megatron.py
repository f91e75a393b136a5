"""Megatron-LM's flags that are no field here: the rows of `tables/megatron.yaml`.

always     it names what nanotrain always does; another value than those listed is an error
no effect  it tunes an implementation that does not exist here; accepted, changes no result
rename     it becomes values of fields
not yet    an error, with the nearest alternative; values that ask for nothing are accepted

`translate.py` applies the rows in the order of the command line, on a configuration that already
has the values of all fields that were set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, get_args

from nanotrain.config import conversions
from nanotrain.config.config import Config
from nanotrain.config.tables import read_table

Kind = Literal["always", "no effect", "rename", "not yet"]
MANY = -1  # arity of a flag that takes all arguments up to the next flag


@dataclass(frozen=True)
class MegatronFlag:
    """One flag of Megatron-LM."""

    kind: Kind
    meaning: str  # what it is here; kind "not yet": the cure
    arity: int = 0  # values it takes
    accepts: tuple[str, ...] = ()  # the accepted values; empty: all, kind "not yet": none
    # kind "no effect": in Megatron-LM it saves time or memory, so the log names it
    saves: bool = False
    # kind "no effect": it asks for a file or a log that is another one here, so the log names it
    differs: bool = False
    # kind "rename", one of four: constant values by unique name
    sets: Mapping[str, Any] = field(default_factory=dict)
    # the unique name of the field that takes its value
    to: str = ""
    # values of fields by the value that it takes
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # the name of a function of config/conversions.py
    convert: str = ""
    # kind "rename": its values replace the values of other flags, as in Megatron-LM
    overrules: bool = False
    # kind "rename": it depends on what the other flags set, so it is converted last
    is_check: bool = False

    def values(self, config: Config, text: str) -> dict[str, Any]:
        """The values of fields that the flag stands for, by unique name."""
        if self.convert:
            values: dict[str, Any] = getattr(conversions, self.convert)(config, text)
            return values
        if self.choices:
            return dict(self.choices[text])
        if self.to:
            return {self.to: text}
        return dict(self.sets)


@dataclass(frozen=True)
class MegatronTable:
    """The content of `tables/megatron.yaml`."""

    flags: dict[str, MegatronFlag]
    # rows of the flags of a whole part of Megatron-LM, by a pattern
    patterns: dict[str, MegatronFlag]
    # Megatron-LM's defaults of the fields where ours differ, by unique name
    defaults: dict[str, Any]
    required: list[str]  # fields without a default in Megatron-LM
    shaping: list[str]  # fields that decide which model is trained


@cache
def megatron() -> MegatronTable:
    """The table, read once."""
    table = read_table("megatron")
    rest = {key: table[key] for key in ("defaults", "required", "shaping")}
    return MegatronTable(rows_of(table), rows_of(table["patterns"]), **rest)


def rows_of(table: Mapping[str, Any]) -> dict[str, MegatronFlag]:
    """The rows of a table, by flag.

    >>> table = {"always": {"--exit-signal {SIGTERM,15}": "SIGTERM saves"}}
    >>> rows_of(table)["--exit-signal"].accepts
    ('SIGTERM', '15')
    """
    rows = {}
    for kind in get_args(Kind):
        for usage, content in table.get(kind, {}).items():
            flag, _, values = usage.partition(" ")
            columns = content if isinstance(content, dict) else {"meaning": content}
            rows[flag] = MegatronFlag(
                kind, arity=arity_of(values), accepts=accepted_values(values), **columns
            )
    return rows


def arity_of(values: str) -> int:
    """The number of values that a usage names.

    >>> arity_of(""), arity_of("VALUE"), arity_of("{a,b}"), arity_of("VALUES") == MANY
    (0, 1, 1, True)
    """
    if values == "VALUES" or " " in values:
        return MANY
    return 1 if values else 0


def accepted_values(values: str) -> tuple[str, ...]:
    """The values that a usage names in braces; empty without braces."""
    if not values.startswith("{"):
        return ()
    return tuple(values[1:-1].split(","))


def row_of(flag: str) -> MegatronFlag | None:
    """The row of a flag, by its name or by a pattern; None for a flag that Megatron-LM lacks.

    >>> row_of("--mamba-head-dim").kind, row_of("--lr")
    ('not yet', None)
    """
    table = megatron()
    if flag in table.flags:
        return table.flags[flag]
    for pattern, row in table.patterns.items():
        if fnmatchcase(flag, pattern):
            return row
    return None
