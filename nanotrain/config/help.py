"""The text of `--help`, made from the fields."""

from nanotrain.config.flags import ALIASES
from nanotrain.config.schema import SECTIONS, Entry, entries_of, plain

INTRODUCTION = """\
usage: torchrun --nproc-per-node N -m nanotrain.train [+config=RECIPE] [SECTION.FIELD=VALUE] [--flag VALUE] ...

Arguments come in any order. The command line overrides the recipe, which overrides train.yaml and the defaults.

  +config=NAME            a recipe of configs/config, or of config/ in your own --config-dir
  +config=FILE.yaml       a configuration file, such as a run's config.yaml
  model=NAME              a YAML file of a group (configs/model, ...)
  --config-dir DIR        a folder of your own YAML files, may be repeated (also hydra.searchpath=[DIR,...])
  --config-name NAME      compose NAME.yaml instead of train.yaml
  --cfg job               print the resolved configuration and exit
  --explain               print it with the origin of every value and exit
  --data-parallel-size N  check that the run has N data-parallel ranks
  --help, -h              print this help and exit
"""


def help_text(topic: str = "") -> str:
    """The flags by section, with meaning and default."""
    parts = [INTRODUCTION, "aliases:"]
    parts += [f"  {flag:<28}  {alias.name}={alias.value}" for flag, alias in ALIASES.items()]
    for name, section in SECTIONS.items():
        parts.append(f"\n{name}: {(section.__doc__ or '').splitlines()[0]}")
        parts += [line for entry in entries_of(name) for line in describe(entry)]
    return "\n".join(parts)


def describe(entry: Entry) -> list[str]:
    """The lines of one field: flag and values, meaning and default."""
    flag = f"--[no-]{entry.flag[2:]}" if entry.kind is bool else f"{entry.flag} {metavar(entry)}"
    return [f"  {flag}", f"        {meaning(entry)} (default: {default_text(entry)})"]


def meaning(entry: Entry) -> str:
    """The meaning of a field, with its unit."""
    text, unit = entry.field.metadata["meaning"], entry.field.metadata["unit"]
    return f"{text} [{unit}]" if unit else text


def metavar(entry: Entry) -> str:
    """The placeholder for a flag's value.

    >>> from nanotrain.config.schema import ENTRIES
    >>> metavar(ENTRIES["lr"]), metavar(ENTRIES["device"])
    ('NUMBER', '{auto,cpu,cuda}')
    """
    if entry.choices:
        return "{" + ",".join(entry.choices) + "}"
    return {bool: "true|false", int: "N", float: "NUMBER", str: "TEXT", list: "TEXT ..."}[entry.kind]


def default_text(entry: Entry) -> str:
    """A default as it is typed."""
    value = plain(entry.default)
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(value) or "empty" if isinstance(value, list) else str(value)
