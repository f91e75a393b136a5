"""The text of `--help`, made from the fields."""

from nanotrain.config.flags import ALIASES
from nanotrain.config.schema import SECTIONS, Entry, entries_of, plain

INTRODUCTION = """\
usage: torchrun --nproc-per-node N -m nanotrain.train [+config=RECIPE] [SECTION.FIELD=VALUE] [--flag VALUE] ...

Words come in any order. The command line beats the recipe, the recipe beats train.yaml, and that beats the defaults.

  +config=NAME            a recipe of configs/config, or of config/ in your own --config-dir
  +config=FILE.yaml       a configuration by its path, such as a run's config.yaml
  model=NAME              a YAML file of a group (configs/model, ...)
  --config-dir DIR        a folder of your own YAML files; may be repeated (also hydra.searchpath=[DIR,...])
  --config-name NAME      compose NAME.yaml in place of train.yaml
  --cfg job               print the resolved configuration and stop
  --explain               the same with the origin of every value
  --data-parallel-size N  an error unless the world has so many data-parallel ranks
  --help, -h              print this and stop
"""


def help_text() -> str:
    """Every flag by section, with its default and meaning."""
    parts = [INTRODUCTION, "aliases:"]
    parts += [f"  {flag:<28}  {alias.name}={alias.value}" for flag, alias in ALIASES.items()]
    for name, section in SECTIONS.items():
        parts.append(f"\n{name}: {(section.__doc__ or '').splitlines()[0]}")
        parts += [line for entry in entries_of(name) for line in describe(entry)]
    return "\n".join(parts)


def describe(entry: Entry) -> list[str]:
    """One field: its flag and what it takes, then its meaning and default."""
    flag = f"--[no-]{entry.flag[2:]}" if entry.kind is bool else f"{entry.flag} {metavar(entry)}"
    return [f"  {flag}", f"        {meaning(entry)} (default: {default_text(entry)})"]


def meaning(entry: Entry) -> str:
    """What a field means, with its unit."""
    text, unit = entry.field.metadata["meaning"], entry.field.metadata["unit"]
    return f"{text} [{unit}]" if unit else text


def metavar(entry: Entry) -> str:
    """What a flag takes.

    >>> from nanotrain.config.schema import ENTRIES
    >>> metavar(ENTRIES["lr"]), metavar(ENTRIES["device"])
    ('NUMBER', '{auto,cpu,cuda}')
    """
    if entry.choices:
        return "{" + ",".join(entry.choices) + "}"
    return {bool: "true|false", int: "N", float: "NUMBER", str: "TEXT", list: "WORD ..."}[entry.kind]


def default_text(entry: Entry) -> str:
    """A default as one would type it."""
    value = plain(entry.default)
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(value) or "empty" if isinstance(value, list) else str(value)
