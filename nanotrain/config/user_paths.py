"""Replace `~` and $VARIABLES in the paths of a command line and of recipes, once.

    with_variables   a path of the command line: every variable that is no secret
    expand_path      any path: `~`, and the variables that a recipe may read
    may_read         whether a recipe may read a variable of the environment

Stored configurations (manifests, data-order.jsonl) do not pass here: they are taken as written.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from nanotrain.config.references import FromEnvironment
from nanotrain.errors import ConfigError
from nanotrain.paths import is_secret, require_variable, with_home

ADDED = "NANOTRAIN_RECIPE_VARIABLES"
# what names a folder, a user or a job on usual machines
NAMES = frozenset(
    (
        *("HOME", "USER", "LOGNAME", "PWD", "TMPDIR", "TMP", "TEMP", "HOSTNAME"),
        *("SCRATCH", "WORK", "WORKDIR", "PROJECT", "DATA", "STORE", "ARCHIVE", "DATADIR"),
        *("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "CONDA_PREFIX", "VIRTUAL_ENV"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JOB_ID", "JOB_NAME"),
    )
)
PREFIXES = ("SLURM_", "PBS_", "LSB_", "OMPI_COMM_")  # variables of a scheduler
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_HOME = re.compile(r"(?<![^\s=])~[^\s/]*")  # where a path of a list or of NAME=PATH begins


def may_read(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a recipe may read a variable of the environment.

    Recipes may come from others, and what they read ends in paths and requests.

    >>> may_read("SCRATCH"), may_read("SLURM_JOB_ID"), may_read("DATABASE_URL")
    (True, True, False)
    """
    if is_secret(name):
        return False
    is_usual = name in NAMES or name.startswith(PREFIXES)
    return is_usual or name in environment.get(ADDED, "").replace(",", " ").split()


def why_not(name: str) -> tuple[str, str]:
    """Why a recipe may not read a variable, and what to do."""
    if is_secret(name):
        return f"the name of {name} is that of a secret", "set the field on the command line"
    return (
        f"a recipe reads no variables but HOME, USER, SCRATCH, WORK, TMPDIR, SLURM_* and the like, "
        f"and {name} is none of them",
        f"set the field on the command line, or export {ADDED}={name} if the recipe may read it",
    )


def with_variables(value: Any) -> Any:
    """A path or list of paths from the command line with the variables that are set.

    Secrets and variables that are not set stay, and `expand_path` refuses them.
    """
    if isinstance(value, list):
        return [with_variables(item) for item in value]
    if not isinstance(value, str) or "$" not in value:
        return value

    def replace(match: re.Match[str]) -> str:
        name = match[1].strip("{}")
        return match[0] if is_secret(name) else os.environ.get(name, f"${name}")

    return _VARIABLE.sub(replace, value)


def expand_path(value: Any) -> Any:
    """A path or list of paths, with `~` and the variables that a recipe may read.

    Raises:
        ConfigError: another variable, or one that is not set; an unknown user.
    """
    if isinstance(value, list):
        return [expand_path(item) for item in value]
    if not isinstance(value, str) or not ("$" in value or "~" in value):
        return value
    for variable in _VARIABLE.findall(value):
        require_variable(variable, text=value)
        name = variable.strip("{}")
        if not may_read(name):
            why, fix = why_not(name)
            raise ConfigError(f"{value} cannot be a path", why=why, fix=fix)
    text = os.path.expandvars(value)
    text = _HOME.sub(lambda match: with_home(match[0]), text)
    if isinstance(value, FromEnvironment):
        return FromEnvironment(text, reference=value.reference)
    return text


def refuse_variables(value: Any) -> Any:
    """A path or paths of a `Config` made in Python, unchanged; variables in them are refused.

    Raises:
        ConfigError: it begins with `~` or has a variable.
    """
    if isinstance(value, list):
        return [refuse_variables(item) for item in value]
    if isinstance(value, str) and (_VARIABLE.search(value) or value.startswith("~")):
        raise ConfigError(
            f"{value} is not expanded",
            why="a Config may be that of a stored file, so its paths are taken as they are",
            fix="make it with configure(...), or call os.path.expandvars and expanduser",
        )
    return value
