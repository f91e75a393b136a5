"""Read one YAML file of the configuration: its mapping, with references that a file may have."""

import io
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from nanotrain.config.schema import ENTRIES
from nanotrain.config.user_paths import may_read, why_not
from nanotrain.errors import ConfigError
from nanotrain.untrusted import read_file, require_few_values

MAX_RECIPE_BYTES = 1 << 18  # a config.yaml with all fields has 20 KB
MAX_RECIPE_VALUES = 20_000  # repetitions by aliases included
_FROM_ENVIRONMENT = re.compile(r"oc\.env: *(\w+) *(,.*)?")


def state_of(path: Path) -> tuple[Path, int, int]:
    """A file, its size and the time when it was written."""
    stat = path.stat()
    return path, stat.st_size, stat.st_mtime_ns


@lru_cache
def plain_yaml(path: Path, *, state: object) -> Any:
    """The values in a YAML file of this state, of bounded size."""
    content = read_file(path, most=MAX_RECIPE_BYTES)
    require_few_values(content, most=MAX_RECIPE_VALUES)
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(content.decode())))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: the file cannot be read, or holds none.
    """
    try:
        content = plain_yaml(path, state=state_of(path))
    except yaml.MarkedYAMLError as error:
        raise syntax_error(path, error) from None
    except GrammarParseError as error:
        raise ConfigError(
            f"{error.full_key} in {path} has a ${{...}} that cannot be read",
            why="a reference is ${section.field} or ${oc.env:NAME}",
            fix="close its bracket, or write the value",
        ) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{path} cannot be read",
            why=" ".join(str(error).split()),
            fix="name a YAML file of nanotrain's sections, in UTF-8",
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds no mapping",
            why="a configuration has sections",
            fix="write section: {field: value}",
        )
    for name, value in scalars(content):
        check_references(value, file=path, name=name)
    return {str(key): value for key, value in content.items()}


def syntax_error(path: Path, error: yaml.MarkedYAMLError) -> ConfigError:
    """The error for a file that is no YAML, with its line."""
    why = ", ".join(filter(None, (error.context, error.problem)))
    line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
    return ConfigError(
        f"{path} cannot be read",
        why=line + why,
        fix="correct the YAML; it is indented with spaces, and each key is set once",
    )


def scalars(value: Any, *, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested mappings and lists, each with the last name above it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from scalars(inner, name=str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from scalars(inner, name=name)
    else:
        yield name, value


def check_references(value: Any, *, file: Path, name: str) -> None:
    """Check the `${...}` of a value in a file, which may come from others.

    References may name fields, and variables of the environment that `may_read` allows.

    Args:
        value: a scalar of the file, before its references are replaced.
        file: the file.
        name: name of the field.

    Raises:
        ConfigError: another reference, or a value of a field that only a variable meant for it may
            give.
    """
    own_variable = ENTRIES[name].secret if name in ENTRIES else ""
    if own_variable:
        is_own = re.fullmatch(rf"\$\{{oc\.env:{own_variable}(, ?null)?\}}", str(value))
        if value is not None and not is_own:
            raise ConfigError(
                f"{name} in {file} is not read",
                why="only its own variable may set it in a file",
                fix=f"write ${{oc.env:{own_variable},null}} there and export {own_variable}, "
                f"or pass {ENTRIES[name].flag}",
            )
        return
    for reference in re.findall(r"(?=\$\{([^}]*))", str(value)):
        if may_refer(reference):
            continue
        why = "a file may refer to fields, and to variables of the environment that name folders, "
        why += "users and jobs"
        fix = "write the value, or set the field on the command line"
        variable = _FROM_ENVIRONMENT.fullmatch(reference)
        if variable:
            why, fix = why_not(variable[1])
        raise ConfigError(f"{name} in {file} refers to ${{{reference}}}", why=why, fix=fix)


def may_refer(reference: str) -> bool:
    """Whether a file may have a reference.

    >>> may_refer("model.hidden_size"), may_refer("oc.env:HOME"), may_refer("oc.env:HF_TOKEN")
    (True, True, False)
    """
    variable = _FROM_ENVIRONMENT.fullmatch(reference)
    if variable:
        return may_read(variable[1])
    return re.fullmatch(r"\.*[\w.\[\]]+", reference) is not None
