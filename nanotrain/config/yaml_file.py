"""Check a YAML file before it is composed: text in UTF-8, of bounded size, depth and number of values."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from nanotrain.errors import ConfigError

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
        node = yaml.compose(content.decode("utf-8"), Loader=_Loader)
        num_nodes = _count(node, {}) if node is not None else 0
        duplicate = next(_duplicates(node), None) if node is not None and num_nodes <= MAX_NODES else None
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8: byte {error.start} is {content[error.start]:#04x}"
        raise ConfigError(f"{path} cannot be read", why=why, fix="convert it to UTF-8") from None
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        why = place + ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{path} cannot be read", why=why, fix="correct the YAML") from None
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
