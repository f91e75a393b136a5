"""Check a YAML file before it is composed: text in UTF-8, of bounded size, depth and number of values.

check_yaml      one file
check_recipe    a file and those that Hydra reads with it
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from nanotrain.errors import ConfigError
from nanotrain.untrusted import MAX_DEPTH

MAX_BYTES, MAX_NODES = 1 << 20, 20_000  # the largest recipe has 2 kB and 60 values
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_yaml(path: Path) -> None:
    """Check one file.

    An alias stands for everything that its anchor names, so a few nested ones stand for billions of values.

    Raises:
        ConfigError: it cannot be read, or it is larger or nested deeper than any configuration.
    """
    fix = "name a YAML file of nanotrain's sections"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path} cannot be read", why=f"it is larger than {MAX_BYTES:,} bytes", fix=fix)
        text = content.decode("utf-8")
        _require_shallow(text)
        node = yaml.compose(text, Loader=_Loader)
        num_nodes = _count(node, {}) if node is not None else 0
        duplicate = next(_duplicates(node), None) if node is not None and num_nodes <= MAX_NODES else None
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8: byte {error.start} is {content[error.start]:#04x}"
        raise ConfigError(f"{path} cannot be read", why=why, fix="convert it to UTF-8") from None
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        why = place + ", ".join(part for part in (error.context, error.problem) if part)
        rest = text.splitlines()[error.problem_mark.line :] if error.problem_mark else []
        is_tab = bool(rest) and rest[0].lstrip(" ").startswith("\t")
        fix = "indent with spaces in place of the tab" if is_tab else "correct the YAML"
        raise ConfigError(f"{path} cannot be read", why=why, fix=fix) from None
    except (OSError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read", why=why, fix=fix) from None
    except RecursionError:
        raise ConfigError(f"{path} cannot be read", why="it is nested too deeply", fix=fix) from None
    if num_nodes > MAX_NODES:
        why = f"its aliases stand for {num_nodes:,} values, the limit is {MAX_NODES:,}"
        raise ConfigError(f"{path} cannot be read", why=why, fix=fix)
    if duplicate is not None:
        line = duplicate.start_mark.line + 1
        why = f"{duplicate.value} is set twice in one section, the second time in line {line}"
        raise ConfigError(f"{path} cannot be read", why=why, fix="leave one of them out")


def check_recipe(path: Path, folders: Sequence[Path]) -> None:
    """Check a file and all files that its defaults list names, directly or not, before Hydra reads them.

    Args:
        path: the file.
        folders: the search path.

    Raises:
        ConfigError: as `check_yaml`.
    """
    waiting, checked = [path], set()
    while waiting:
        path = waiting.pop()
        if path not in checked:
            check_yaml(path)
            checked.add(path)
            waiting += _files_of_defaults(path, folders)


def _files_of_defaults(path: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """The files that the entries of a defaults list may name; any file for an interpolation."""
    try:
        content = yaml.load(path.read_bytes(), Loader=_Loader)  # its aliases are not written out
    except (yaml.YAMLError, ValueError):  # a tag, or no date in spite of its form; no defaults list is followed
        return
    defaults = content.get("defaults") if isinstance(content, dict) else None
    group = next((str(path.parent.relative_to(each)) for each in folders if path.is_relative_to(each)), ".")
    for entry in defaults if isinstance(defaults, list) else ():
        for key, value in entry.items() if isinstance(entry, dict) else [("", entry)]:
            where = re.sub("^((override|optional) +)*", "", str(key)).partition("@")[0].strip("/")
            for name in value if isinstance(value, list) else [value]:
                file = f"{str(name).partition('@')[0].strip('/').removesuffix('.yaml')}.yaml"
                pattern = re.sub(r"\$\{[^}]*\}", "*", glob.escape(os.path.join(where, file)))
                for start in {Path(folder, inner) for folder in folders for inner in (".", group)}:
                    found = glob.glob(os.path.normpath(os.path.join(glob.escape(str(start)), pattern)))
                    yield from (each for each in map(Path, found) if each.is_file())


def _require_shallow(text: str) -> None:
    """Raise a RecursionError for deep nesting, at which the parser, which is written in C, ends the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise RecursionError


def _duplicates(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """The keys that a mapping already has; aliases are written out."""
    if isinstance(node, yaml.MappingNode):
        known = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in known:
                    yield key
                known.add(key.value)
            yield from _duplicates(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _duplicates(item)


def _count(node: yaml.Node, counted: dict[int, int]) -> int:
    """Values of a node with all its aliases written out."""
    if id(node) not in counted:
        counted[id(node)] = 1  # an alias of itself counts once; OmegaConf refuses it
        children = list(node.value) if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        counted[id(node)] = 1 + sum(_count(child, counted) for child in children)
    return counted[id(node)]
