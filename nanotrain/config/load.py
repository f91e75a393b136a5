"""From the words of a command line to a `Config`: parse, compose, lay over, settle, check.

    words --flags.parse--> CommandLine --compose_files--> values of the YAML --lay_over--> plain values
          --config_from_dict--> Config --settle_idle--> Config --validate--> Config

`load` does all of it; `answer` serves the words that ask for text in place of a run (`--help`, `--explain`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from nanotrain.config.config import Config
from nanotrain.config.flags import CommandLine, parse
from nanotrain.config.help import help_text
from nanotrain.config.idle import settle_idle
from nanotrain.config.schema import KEYS, config_from_dict, plain, to_dict, value_of
from nanotrain.config.validate import require_trainable, validate


@dataclass(frozen=True)
class Loaded:
    """A configuration and how it came to be."""

    config: Config
    explicit: frozenset[str]  # keys set on the command line, as "model.hidden_size"
    recipe: str | None  # NAME of +config=NAME
    data_parallel_size: int | None  # --data-parallel-size, to be checked against the world
    origins: dict[str, str]  # key -> who said the value: default, a YAML file, or the words of the command line


def load_config(argv: Sequence[str]) -> Config:
    """The configuration that a command line asks for, checked for training.

    Args:
        argv: the words after the program's name.

    Raises:
        ConfigError: anything unknown, of the wrong type, or contradictory.
    """
    return load(argv).config


def load(argv: Sequence[str], *, to_train: bool = True) -> Loaded:
    """As `load_config`, with what else the words said.

    Args:
        argv: the words after the program's name.
        to_train: refuse what can be planned but not yet trained (`require_trainable`).
    """
    loaded = compose_line(parse(argv))
    validate(loaded.config)
    if to_train:
        require_trainable(loaded.config)
    return loaded


def compose_line(line: CommandLine) -> Loaded:
    """Compose what a parsed command line asks for; values are checked one by one, not yet against each other."""
    from nanotrain.config.compose import compose_files, lay_over  # Hydra takes 0.2 s, and --help goes without

    composed = compose_files(line)
    config = config_from_dict(lay_over(composed.values, line.settings))
    origins = dict.fromkeys(KEYS, "default") | composed.files
    origins |= {setting.key: f"command line: {setting.words}" for setting in line.settings}
    recipe = line.choices.get("config")
    if config.train.run_dir is None:
        name = Path(recipe).stem if recipe else "train"
        config = replace(config, train=replace(config.train, run_dir=f"runs/{name}"))
    settled = settle_idle(config, explicit=line.explicit)
    origins |= settled.origins
    return Loaded(settled.config, line.explicit, recipe, line.data_parallel_size, origins)


def answer(argv: Sequence[str]) -> str | None:
    """The text that `--help`, `--explain` or `--cfg job` asks for; None where the words ask for a run."""
    if "-h" in argv or "--help" in argv:
        return help_text()
    line = parse(argv)
    if line.wants_explanation:
        return explain(argv)
    return to_yaml(compose_line(line).config).rstrip() if line.wants_job else None


def explain(argv: Sequence[str]) -> str:
    """The resolved configuration with the origin of every value, one line each."""
    loaded = compose_line(parse(argv))
    rows = [
        (
            key,
            yaml_value(value_of(loaded.config, key)),
            loaded.origins[key].replace("\n", "\\n"),
        )
        for key in KEYS
    ]
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
