"""From a parsed command line to a `Config`: compose, merge, convert, reset, check.

    arguments --flags.parse--> CommandLine --compose_files--> values of the YAML --merge_settings--> plain values
              --config_from_dict--> Config --reset_unused--> Config --validate--> Config

All mistakes of a command line are in one error: those in arguments, names and types first, then, where every value
could be read, all broken rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from nanotrain.config.config import Config
from nanotrain.config.flags import CommandLine, parse
from nanotrain.config.help import help_text
from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import KEYS, config_from_dict, plain, to_dict, value_of, with_values
from nanotrain.config.validate import collect_errors
from nanotrain.errors import ErrorCollector


@dataclass(frozen=True)
class Loaded:
    """A configuration and how it was composed."""

    config: Config  # the configuration
    explicit: frozenset[str]  # keys set on the command line, as "model.hidden_size"
    recipe: str | None  # NAME of +config=NAME
    data_parallel_size: int | None  # value of --data-parallel-size, to be checked against the world
    origins: dict[str, str]  # key -> source of its value: "default", a YAML file, or the arguments


def load_config(argv: Sequence[str]) -> Config:
    """The configuration of the arguments after the program's name, checked for training.

    Raises:
        ConfigError: everything unknown, of the wrong type, or contradictory.
    """
    return load(argv).config


def load(argv: Sequence[str], *, to_train: bool = True) -> Loaded:
    """Parse and load a command line; see `load_line`."""
    return load_line(parse(argv), to_train=to_train)


def load_line(line: CommandLine, *, to_train: bool = True) -> Loaded:
    """The checked configuration of a parsed command line; with `to_train`, also checked for training.

    Raises:
        ConfigError: all mistakes.
    """
    errors = ErrorCollector()
    loaded = compose_line(line, errors=errors)
    collect_errors(loaded.config, to_train=to_train, errors=errors)
    errors.raise_errors()
    return loaded


def compose_line(line: CommandLine, *, errors: ErrorCollector) -> Loaded:
    """The configuration of a parsed command line, its values not yet checked against each other.

    Settings without effect are collected in `errors`.

    Raises:
        ConfigError: all mistakes in arguments, names and types.
    """
    from nanotrain.config.compose import compose_files, merge_settings  # Hydra takes 0.2 s; --help does without

    with line.errors:
        composed = compose_files(line)
        config = config_from_dict(merge_settings(composed.values, line.settings))
    line.errors.raise_errors()
    origins = dict.fromkeys(KEYS, "default") | composed.files
    origins |= {setting.key: f"command line: {setting.text}" for setting in line.settings}
    recipe = line.choices.get("config")
    if config.train.run_dir is None:
        config = with_values(config, {"train.run_dir": f"runs/{Path(recipe).stem if recipe else 'train'}"})
    config, reset = reset_unused(config, explicit=line.explicit, errors=errors)
    return Loaded(config, line.explicit, recipe, line.data_parallel_size, origins | reset)


def reply(line: CommandLine) -> str | None:
    """The text for `--help`, `--explain` or `--cfg job`; None for a command line without these flags."""
    if line.wants_help:
        return help_text()
    if not line.wants_explanation and not line.wants_job:
        return None
    errors = ErrorCollector()
    loaded = compose_line(line, errors=errors)
    errors.raise_errors()
    return explain(loaded) if line.wants_explanation else to_yaml(loaded.config).rstrip()


def explain(loaded: Loaded) -> str:
    """The configuration with the origin of every value, one line per field."""
    rows = [(key, yaml_value(value_of(loaded.config, key)), loaded.origins[key].replace("\n", "\\n")) for key in KEYS]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for key, value, origin in rows)


def yaml_value(value: object) -> str:
    """A value in one line of YAML."""
    quotes = '"' if isinstance(value, str) and "\n" in value else None  # other quotes would break the line
    text: str = yaml.safe_dump(plain(value), default_flow_style=True, default_style=quotes, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML, itself a valid input: `+config=FILE.yaml`."""
    from omegaconf import OmegaConf  # its reader takes 1e3 for a number, so its writer must put the quotes

    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))
