"""The arguments that exist, as tables: flags of fields, flags for one value; and the errors for those that do not.

An error names what was probably meant, and what to write.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from nanotrain.config.megatron import row_of
from nanotrain.config.option import Entry, flag_of
from nanotrain.config.schema import ENTRIES
from nanotrain.config.suggest import LISTED_BY, advise, by_meaning, cure_of, nearest
from nanotrain.errors import ConfigError


@dataclass(frozen=True)
class Alias:
    """A flag for one value of a field; another argument may set the field to a value of `agrees` only."""

    name: str
    value: str
    agrees: tuple[str, ...]


ALIASES: dict[str, Alias] = {
    "--bf16": Alias("params_dtype", "bf16", agrees=("bf16",)),
    "--fp16": Alias("params_dtype", "fp16", agrees=("fp16",)),
    "--grad-reduce-in-fp32": Alias("accumulate_allreduce_grads_in_fp32", "true", agrees=("true",)),
    "--fp8": Alias("fp8_format", "hybrid", agrees=("hybrid",)),
    "--swiglu": Alias("activation", "swiglu", agrees=("swiglu",)),
    "--squared-relu": Alias("activation", "squared_relu", agrees=("squared_relu",)),
    "--quick-geglu": Alias("activation", "quick_geglu", agrees=("quick_geglu",)),
    "--cpu-optimizer": Alias("optimizer_cpu_offload", "true", agrees=("true",)),
    "--recompute-activations": Alias("recompute_granularity", "selective", agrees=("selective",)),
    "--use-distributed-optimizer": Alias(
        "data_parallel_sharding_strategy", "optim", agrees=("optim", "optim_grads", "optim_grads_params")
    ),
}
# Other spellings of a value, by unique name: Megatron-FSDP counts the strategies, -1 validation batches are none,
# Muon updates full matrices wherever they are computed, its state is sharded by the strategy and not by a name of its
# own, and some numbers ask for nothing.
VALUES: dict[str, dict[str, str]] = {
    "data_parallel_sharding_strategy": dict(
        zip("0123", ENTRIES["data_parallel_sharding_strategy"].choices, strict=True)
    ),
    "eval_iters": {"-1": "0"},
    "optimizer": {"dist_muon": "muon"},
    "muon_tp_mode": {"duplicated": "distributed"},
    "num_experts": {"0": "null"},
    "window_size": {"-1,0": "null", "(-1,0)": "null", "(-1, 0)": "null"},
    "moe_expert_capacity_factor": {"-1": "null", "-1.0": "null"},
}
FLAGS: dict[str, Entry] = {entry.flag: entry for entry in ENTRIES.values()}
NEGATIONS: dict[str, Entry] = {f"--no-{flag[2:]}": entry for flag, entry in FLAGS.items() if entry.kind is bool}
# Flags without a value that set no field, and the attribute of CommandLine that becomes true.
SWITCHES = {"--explain": "wants_explanation", "--megatron-defaults": "wants_megatron_defaults"}

NO_HYPHENS = tuple("\u2010\u2011\u2012\u2013\u2014\u2015\u2212")  # typographic hyphens, dashes and minus

# Arguments that set no field by themselves, as they are written, and what they do.
ARGUMENTS = {
    "+config=NAME": "a recipe of configs/config, or of config/ in your own --config-dir",
    "+config=FILE.yaml": "a configuration file, such as a run's config.yaml",
    "model=NAME": "a YAML file of a group (configs/model, ...)",
    "--config-dir DIR": "a folder of your own YAML files, may be repeated (also hydra.searchpath=[DIR,...])",
    "--config-name NAME": "compose NAME.yaml instead of train.yaml",
    "--cfg job": "print the resolved configuration and exit",
    "--explain": "print it with the origin of every value and exit",
    "--data-parallel-size N": "check that the run has N data-parallel ranks",
    "--megatron-defaults": "Megatron-LM's defaults where no file and no argument sets a value",
    "--help[=TOPIC]": "print this help, or that of all, megatron or a section, and exit; also -h",
}


def choice_of(group: str) -> str:
    """The argument before `=NAME` that chooses a YAML file of a group: `+config`, `model`."""
    return "+config" if group == "config" else group


def is_file(name: str) -> bool:
    """Whether the NAME of `+config=NAME` is a file and not one of the recipes."""
    return name.endswith((".yaml", ".yml"))


def unknown_flag(flag: str, *, known: Collection[str], listed_by: str = LISTED_BY) -> ConfigError:
    """The error for a flag that does not exist: what it is called here, else the nearest spelling, else where to look.

    >>> unknown_flag("--learning-rate", known=["--lr"]).fix
    'did you mean --lr?'
    """
    field = flag_of(flag.rpartition(".")[2].strip("-"))
    if field in known and not by_meaning(flag):  # a key, a flag with a section, or another number of dashes
        cure: str | None = field
    else:
        cure = cure_of(flag, known) or nearest(flag, known)
    return ConfigError(f"unknown flag {flag}", fix=advise(cure) if cure else f"{listed_by} lists the flags")


def no_value(flag: str) -> ConfigError:
    """The error for a flag at the end, or in front of another flag."""
    written = next((text for text in ARGUMENTS if text.split()[0] == flag), "")
    fix = FLAGS[flag].meaning if flag in FLAGS else f"write {written}" if written else ""
    return ConfigError(f"{flag} has no value", why="it takes one", fix=fix)


def takes_no_value(flag: str, value: str) -> ConfigError:
    """The error for `--flag=value` of a flag without values."""
    fix = f"write {flag} alone or leave it out"
    return ConfigError(f"{flag}={value} gives {flag} a value", why="it takes none", fix=fix)


def quoted(argument: str) -> ConfigError:
    """The error for several words in one argument."""
    why, fix = "the shell passes what stands between quotes as one argument", "leave out the quotes around it"
    return ConfigError(f"one argument holds several: {argument!r}", why=why, fix=fix)


def no_hyphen(argument: str) -> ConfigError:
    """The error for a flag that was copied from a text with typographic dashes."""
    why = "it begins with a typographic dash in place of hyphens, as some programs write it"
    fix = f"write --{argument.lstrip(''.join(NO_HYPHENS) + '-')}"
    return ConfigError(f"unexpected argument {argument!r}", why=why, fix=fix)


def spaced(key: str, *, rest: Sequence[str]) -> ConfigError:
    """The error for `key = value` and `key value`, which a shell passes in parts."""
    value = "".join(rest).removeprefix("=") or ("NAME" if key == "+config" else "VALUE")
    why = "a key, = and its value are one argument"
    return ConfigError(f"unexpected argument {' '.join([key, *rest])!r}", why=why, fix=f"write {key}={value}")


def unexpected(argument: str, *, previous: str, listed_by: str = LISTED_BY) -> ConfigError:
    """The error for an argument that is neither a flag, its value nor an override; `previous` stands before it."""
    flag, what = f"--{argument}", f"unexpected argument {argument!r}"
    if previous in FLAGS and FLAGS[previous].kind is bool:
        return ConfigError(what, why=f"{previous} takes no value", fix=f"write {previous}={argument}")
    if previous in ALIASES or previous in NEGATIONS or previous in SWITCHES or row_of(previous):
        return ConfigError(what, why=f"{previous} takes no more values", fix=f"leave {argument} out")
    if previous in FLAGS and FLAGS[previous].kind is not list and re.fullmatch(r"[\d.eE+-]+", argument):
        why, name = f"{previous} takes one value", previous.removeprefix("--")
        return ConfigError(what, why=why, fix=f"leave it out; nanotrain sweep --over {name}=V1,V2 tries several")
    why = "it is neither a flag nor key=value"
    if flag in FLAGS or flag in ALIASES or row_of(flag):
        return ConfigError(what, why=why, fix=f"write {flag}")
    if not argument:
        return ConfigError("an empty argument", why=why, fix="remove the quotes around a variable that is not set")
    if not argument.strip(" \\"):
        fix = "end the line with the backslash, or write the whole command on one line without it"
        return ConfigError(what, why="a backslash goes on to the next line only at the end of a line", fix=fix)
    if argument.startswith("$"):
        fix = "define the variable, and write it without single quotes"
        return ConfigError(what, why="the shell has not replaced the variable", fix=fix)
    meant, suffix = by_meaning(argument), PurePath(argument).suffix
    if meant:
        return ConfigError(what, why=why, fix=advise(meant))
    fix = f"write +config={argument}" + ("" if is_file(argument) else " for the recipe of that name")
    if listed_by != LISTED_BY:  # a command without recipes
        fix = f"write the flag that it belongs to before it; {listed_by} lists them"
    elif suffix == ".py":
        fix = "leave it out: the program is python -m nanotrain.train"
    elif suffix in (".toml", ".json"):
        fix = "write its settings into a YAML file, and +config=FILE.yaml"
    elif not (argument.isidentifier() or is_file(argument)):
        fix = f"write the flag that it belongs to before it; {listed_by} lists them"
    return ConfigError(what, why=why, fix=fix)
