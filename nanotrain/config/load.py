"""From a command line to a checked `Config`; `configure` does the same from Python values.

    arguments --parse--> CommandLine --compose_files, merge_settings--> plain values by key
              --read_config--> Config --translate--> Config --reset_unused--> Config
              --collect_errors--> checked Config

All mistakes of a command line are in one error: first those in arguments, names and types, then
broken rules. Rules on fields that could not be read are not checked.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from nanotrain.config.addresses import require_loopback
from nanotrain.config.arguments import ALIASES, FLAGS, unknown_flag
from nanotrain.config.command_line import CommandLine, Setting
from nanotrain.config.config import Config
from nanotrain.config.flags import apply_aliases, parse
from nanotrain.config.help import USAGE, help_text
from nanotrain.config.option import flag_of
from nanotrain.config.references import (
    as_written,
    marked_values,
    text_without_values,
    without_values,
)
from nanotrain.config.rules.check import collect_errors
from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import (
    ENTRIES,
    KEYS,
    flat_values,
    read_config,
    to_dict,
    with_values,
)
from nanotrain.config.translate import Translation, megatron_values, translate
from nanotrain.config.user_paths import expand_path, refuse_variables
from nanotrain.errors import ConfigError, ErrorCollector

# a YAML writer that puts text such as 1e3 into quotes: OmegaConf reads it as a number without them
_WRITER: Any = type("_Writer", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {})
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
_WRITER.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


@dataclass(frozen=True)
class Loaded:
    """A configuration and how it was composed."""

    config: Config
    origins: dict[str, str]  # key -> source of its value: "default", a YAML file, or the arguments
    explicit: frozenset[str] = frozenset()  # keys set on the command line, as "model.hidden_size"
    recipe: str | None = None  # NAME of +config=NAME
    # value of --data-parallel-size, to be checked against the world
    data_parallel_size: int | None = None
    # lines for the log: what was accepted without effect, implied or left out
    notes: tuple[str, ...] = ()
    # unique names of the fields whose value could not be read
    unreadable: frozenset[str] = frozenset()

    def require_only(
        self, keys: Collection[str], *, what: str, why: str, fix: str = "leave it out"
    ) -> None:
        """Refuse a recipe and settings that a command does not read.

        Args:
            keys: keys of the settings that it reads.
            what: name of the command, for the error.
            why: reason why it reads no others.
            fix: cure of the error.

        Raises:
            ConfigError: one for all of them.
        """
        others = [KEYS[key].flag for key in sorted(self.explicit.difference(keys))]
        if self.recipe is not None:
            others.append(f"+config={self.recipe}")
        if others:
            raise ConfigError(f"{', '.join(others)} has no effect on {what}", why=why, fix=fix)


def load_config(argv: Sequence[str]) -> Config:
    """The configuration of the arguments after the program's name, checked for training.

    Raises:
        ConfigError: everything unknown, of the wrong type, or contradictory.
    """
    return load(argv).config


def configure(recipe: str | Path | None = None, **values: Any) -> Config:
    """The configuration of a recipe with some fields changed, the same as from a command line.

    >>> configure("tiny", lr=1e-3, eval_interval=0).optim.lr
    0.001

    Args:
        recipe: a name of configs/config, or a YAML file; None for the defaults.
        values: fields by their unique names, which are the flags with underscores; flags for one
            value, such as `bf16`, are True.

    Raises:
        ConfigError: all mistakes.
    """
    line = CommandLine(choices={"config": str(recipe)} if recipe else {})
    for name, value in values.items():
        with line.errors:
            add_value(line, name, value=value)
    apply_aliases(line)
    return load_line(line).config


def add_value(line: CommandLine, name: str, *, value: Any) -> None:
    """Add a field or an alias, by its unique name, to a command line.

    Raises:
        ConfigError: an unknown name, or a value for an alias.
    """
    flag = flag_of(name)
    if flag in ALIASES:
        if value is not True:
            raise ConfigError(
                f"{name}={value!r}",
                why=f"{flag} takes no value",
                fix=f"write {name}=True, or leave it out",
            )
        line.aliases.append(flag)
        return
    if name not in ENTRIES:
        raise unknown_flag(flag, known=[*FLAGS, *ALIASES])
    text = f"{name}={as_written(value)!r}"
    line.settings.append(Setting(ENTRIES[name].key, text_of(value), text))


def shown(setting: Setting) -> str:
    """A setting as written, without a secret value."""
    entry = KEYS.get(setting.key)
    return f"{entry.flag} (hidden)" if entry is not None and entry.secret else setting.text


def text_of(value: Any) -> str | list[str]:
    """A Python value as the text of a flag."""
    if isinstance(value, list | tuple):
        return [str(as_written(item)) for item in value]
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(as_written(value))


def load_object(config: Config) -> Loaded:
    """A configuration made in Python, checked for training as the `config.yaml` of a run is.

    Raises:
        ConfigError: all mistakes.
    """
    errors = ErrorCollector()
    # not by way of a file: files hide secrets, flat_values keeps them
    config, bad_keys = read_config(flat_values(config), errors=errors, expand=refuse_variables)
    if config.train.run_dir is None:
        config = with_values(config, {"train.run_dir": "runs/train"})
    unreadable = frozenset(KEYS[key].name for key in bad_keys)
    config, reset = reset_unused(config, explicit=frozenset(), errors=errors, unreadable=unreadable)
    collect_errors(config, to_train=True, errors=errors, unreadable=unreadable)
    errors.raise_errors()
    origins = {}
    for key, value in flat_values(config).items():
        origins[key] = "default" if value == KEYS[key].default else "Python"
    return Loaded(config, origins | reset, unreadable=unreadable)


def load(argv: Sequence[str], *, to_train: bool = True) -> Loaded:
    """Parse and load a command line; see `load_line`."""
    return load_line(parse(argv), to_train=to_train)


def load_line(line: CommandLine, *, to_train: bool = True) -> Loaded:
    """The checked configuration of a parsed command line.

    Raises:
        ConfigError: all mistakes.
    """
    errors = ErrorCollector()
    loaded = compose_line(line, errors=errors)
    collect_errors(loaded.config, to_train=to_train, errors=errors, unreadable=loaded.unreadable)
    hide_values(errors, flat_values(loaded.config))
    errors.raise_errors()
    return loaded


def hide_values(errors: ErrorCollector, values: Any) -> None:
    """Write `${oc.env:KEY}` in the errors in place of the values, which may be keys."""
    errors.errors = [without_values(error, values) for error in errors.errors]


def compose_line(line: CommandLine, *, errors: ErrorCollector) -> Loaded:
    """The configuration of a parsed command line, its values not yet checked against each other.

    Mistakes in arguments, names and types, missing features and settings without effect are
    collected in `errors`.

    Raises:
        ConfigError: YAML files that cannot be composed, with all mistakes found by then.
    """
    errors.errors += line.errors.errors
    composed = compose_values(line, errors=errors)
    config, bad_keys = read_config(
        composed.values,
        errors=errors,
        files=composed.files_of(line.explicit),
        expand=expand_path,
    )
    unreadable = frozenset(KEYS[key].name for key in bad_keys) | fields_in_cures(errors)
    with errors:
        require_loopback(config, composed.files_of(line.explicit))
    recipe = line.choices.get("config")
    if config.train.run_dir is None:
        name = Path(recipe).stem if recipe else "train"
        config = with_values(config, {"train.run_dir": f"runs/{name}"})
    result = translate(config, line, errors=errors, from_files=frozenset(composed.files))
    origins = composed.origins(line)
    leave_quickstart(result, origins)
    unset = {key for key, source in origins.items() if source == "--megatron-defaults"}
    config, reset = reset_unused(
        result.config,
        explicit=result.explicit,
        errors=errors,
        defaults=frozenset(unset - result.explicit),
        unreadable=unreadable,
    )
    hide_values(errors, composed.values)
    hide = partial(text_without_values, values=list(marked_values(composed.values)))
    origins |= result.origins | reset
    result.notes += [f"{key}: {why}" for key, why in reset.items() if key in result.explicit]
    return Loaded(
        config,
        {key: hide(text) for key, text in origins.items()},
        explicit=result.explicit,
        recipe=recipe,
        data_parallel_size=line.data_parallel_size,
        notes=tuple(map(hide, result.notes)),
        unreadable=unreadable,
    )


@dataclass(frozen=True)
class Composed:
    """The values that files and settings give, by key."""

    values: Mapping[str, Any]
    files: Mapping[str, str]  # the last file that sets a key
    defaults: Mapping[str, Any]  # Megatron-LM's defaults

    def files_of(self, explicit: Collection[str]) -> dict[str, str]:
        """The files of the keys that the command line does not set, for errors."""
        return {key: file for key, file in self.files.items() if key not in explicit}

    def origins(self, line: CommandLine) -> dict[str, str]:
        """The source of every field's value."""
        origins = dict.fromkeys(KEYS, "default")
        origins |= dict.fromkeys(self.defaults, "--megatron-defaults")
        origins |= self.files
        for setting in line.settings:
            origins[setting.key] = f"command line: {shown(setting)}"
        return origins


def compose_values(line: CommandLine, *, errors: ErrorCollector) -> Composed:
    """Compose the files of a command line and merge its settings into them.

    Raises:
        ConfigError: they cannot be composed, with all mistakes found by then.
    """
    # Hydra takes 0.2 s; not for --help
    from nanotrain.config.compose import compose_files
    from nanotrain.config.merge import merge_settings

    defaults = megatron_values() if line.wants_megatron_defaults else {}
    with errors:
        values, files = compose_files(line)
        values = merge_settings(values, line.settings, defaults=defaults)
        return Composed(values, files, defaults)
    errors.raise_errors()
    raise AssertionError("values are missing without an error")


def leave_quickstart(result: Translation, origins: Mapping[str, str]) -> None:
    """Replace the settings of a quick-start recipe that only fit the quick-start corpus.

    The recipe's prompt is left out with its corpus. A prompt from elsewhere stays.

    Args:
        result: configuration of a command line.
        origins: source of every value.
    """
    explicit = result.explicit
    if origins["train.generate_prompt"] != origins["data.quickstart"]:
        explicit |= {"train.generate_prompt"}
    changes = without_quickstart(result.config, explicit=explicit)
    result.config = with_values(result.config, {key: value for key, (value, _) in changes.items()})
    result.origins.update({key: why for key, (_, why) in changes.items()})


def without_quickstart(config: Config, *, explicit: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Values that a quick-start recipe changes on other data, by key, each with its reason.

    With synthetic tokens no tokenizer is trained, so the vocabulary size is set to that of the
    quick start. With another corpus the recipe's prompt, which is Python code, is left out.

    Args:
        config: configuration of a command line.
        explicit: keys that the command line sets; they stay.
    """
    data = config.data
    if not data.quickstart:
        return {}
    changes: dict[str, tuple[Any, str]] = {}
    if data.mock_data:
        has_tokenizer = data.tokenizer_model is not None or data.vocab_file is not None
        if config.model.vocab_size is None and not has_tokenizer:
            why = "--mock-data: data.quickstart_vocab_size"
            changes["model.vocab_size"] = (data.quickstart_vocab_size, why)
    elif data.data_path or data.train_data_path or data.stages:
        why = "the corpus is not that of the quick start"
        changes["data.quickstart"] = (False, why)
        changes["train.generate_prompt"] = ("", why)
    return {key: change for key, change in changes.items() if key not in explicit}


def fields_in_cures(errors: ErrorCollector) -> frozenset[str]:
    """Unique names of the fields that the cures of argument mistakes name.

    Their values are not the intended ones.
    """
    names = set[str]()
    for error in errors.errors:
        for word in re.findall(r"[\w.-]+", error.fix):
            entry = FLAGS.get(word) or KEYS.get(word)
            if entry is not None:
                names.add(entry.name)
    return frozenset(names)


def reply(line: CommandLine, *, usage: str = USAGE) -> str | None:
    """The text for `--help`, `--explain` or `--cfg job`; None without these flags."""
    if line.help_topic is not None:
        return help_text(line.help_topic, usage=usage)
    if not line.wants_explanation and not line.wants_job:
        return None
    errors = ErrorCollector()
    loaded = compose_line(line, errors=errors)
    errors.raise_errors()
    return explain(loaded, line) if line.wants_explanation else to_yaml(loaded.config).rstrip()


def explain(loaded: Loaded, line: CommandLine) -> str:
    """The configuration with the origin of every value, and the meaning of Megatron-LM's flags."""
    values = {key: yaml_value(value) for key, value in flat_values(loaded.config).items()}
    keys = sorted(KEYS, key=lambda key: loaded.origins[key] == "default")
    key_width = max(map(len, keys))
    value_width = max(map(len, values.values()))
    lines = []
    for key in keys:
        origin = loaded.origins[key].replace("\n", "\\n")
        lines.append(f"{key:<{key_width}}  {values[key]:<{value_width}}  {origin}")
    if line.megatron:
        lines += ["", "flags of Megatron-LM that are no field:", *flag_lines(line)]
    return "\n".join(lines)


def flag_lines(line: CommandLine) -> list[str]:
    """The kind and the meaning here of every flag of Megatron-LM that is no field."""
    arguments = dict.fromkeys(line.megatron)
    width = max((len(argument.text) for argument in arguments), default=0)
    return [
        f"{argument.text:<{width}}  {argument.row.kind:<9}  {argument.row.meaning}"
        for argument in arguments
    ]


def yaml_value(value: object) -> str:
    """A value in one line of YAML."""
    # other quotes would break the line
    quotes = '"' if isinstance(value, str) and "\n" in value else None
    text: str = yaml.safe_dump(
        as_written(value), default_flow_style=True, default_style=quotes, width=1000
    )
    return text.removesuffix("\n").removesuffix("\n...")


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML, itself a valid input: `+config=FILE.yaml`."""
    text: str = yaml.dump(to_dict(config), Dumper=_WRITER, sort_keys=False, allow_unicode=True)
    return text
