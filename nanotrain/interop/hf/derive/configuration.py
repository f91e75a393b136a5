"""The configuration class of a folder as text: it is parsed, and never imported or run.

ConfigurationText   what the class says of entries of config.json
read_configuration  the class in the files of a folder
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.derive.source import MAX_SOURCE_BYTES, UNPARSABLE
from nanotrain.untrusted import own_file, plain_text, read_file, shown

PLAIN = (bool, int, float, str, type(None))  # types of defaults that a row can have
MISSING = object()  # no literal


@dataclass(frozen=True)
class ConfigurationText:
    """The entries that a configuration class defines; empty for a folder without its file.

    Attributes:
        defaults: entries whose default is a number, text, a truth value or None.
        computes: names that its code reads for more than to keep them as they are.
        aliases: names that modeling code may have for entries, the keys of `attribute_map`.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    computes: frozenset[str] = frozenset()
    aliases: frozenset[str] = frozenset()


def read_configuration(folder: Path, *, raw: Mapping[str, Any], kind: str) -> ConfigurationText:
    """The configuration class of a `model_type` in the files of a folder.

    It is the one that `auto_map` of config.json names, or the one with the `model_type`. Classes of
    the same file that it builds on are read too.

    Raises:
        HuggingFaceError: a file cannot be parsed, or it is not clear which class is meant.
    """
    paths = sorted(folder.glob("configuration_*.py"))
    if not paths:
        return ConfigurationText()
    name = _named_class(raw)
    found = []
    for path in paths:
        classes = _classes(path)
        matching = [node for node in classes.values() if _is_meant(node, name=name, kind=kind)]
        found += [_with_base_classes(node, classes) for node in matching]
    if len(found) != 1:
        wanted = f"named {shown(name)}" if name else f"with model_type {shown(kind)}"
        raise HuggingFaceError(
            f"the configuration of {folder} is not clear",
            why=f"{len(found)} classes of its configuration_*.py are {wanted}, one is needed",
            fix="keep the file and the class that the model was published with; `auto_map` of "
            "config.json names it under AutoConfig",
        )
    return _read_classes(found[0])


def _named_class(raw: Mapping[str, Any]) -> str:
    """The class that `auto_map` names, without its file; "" without any."""
    auto_map = raw.get("auto_map")
    if not isinstance(auto_map, dict):
        return ""
    return str(auto_map.get("AutoConfig", "")).rpartition(".")[2]


def _classes(path: Path) -> dict[str, ast.ClassDef]:
    """The classes of a file by their names."""
    try:
        module = ast.parse(read_file(own_file(path), most=MAX_SOURCE_BYTES))
    except (OSError, *UNPARSABLE) as error:
        raise HuggingFaceError(
            f"cannot parse {path}",
            why=plain_text(str(error))[:200],
            fix="fetch the folder again: the defaults of its entries are read there as text",
        ) from None
    return {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}


def _is_meant(node: ast.ClassDef, *, name: str, kind: str) -> bool:
    """Whether a class has this name or, without a name, this `model_type`."""
    if name:
        return node.name == name
    return any(key == "model_type" and value == kind for key, value in _attributes(node))


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """Attributes of a class and their values; MISSING for values that are no literals."""
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            target = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign):
            target = statement.target
        else:
            continue
        value = _literal_value(statement.value)
        if isinstance(target, ast.Name):
            yield target.id, value


def _with_base_classes(
    node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]
) -> list[ast.ClassDef]:
    """The base classes of a class that its file defines, then the class itself."""
    lineage = [node]
    for current in lineage:  # grows in the loop
        for base in current.bases:
            parent = classes.get(getattr(base, "id", ""))
            if parent is not None and parent not in lineage:
                lineage.append(parent)
    return lineage[::-1]


def _read_classes(lineage: list[ast.ClassDef]) -> ConfigurationText:
    """The attributes of classes; later classes replace attributes of earlier ones."""
    defaults: dict[str, Any] = {}
    computes: set[str] = set()
    aliases: set[str] = set()
    for node in lineage:
        defaults |= _defaults_of_class(node)
        computes |= _names_that_code_reads(node)
        mapped = dict(_attributes(node)).get("attribute_map")
        if isinstance(mapped, dict):
            aliases |= {name for name in mapped if isinstance(name, str)}
    plain = {name: value for name, value in defaults.items() if type(value) in PLAIN}
    return ConfigurationText(plain, frozenset(computes), frozenset(aliases))


def _defaults_of_class(node: ast.ClassDef) -> dict[str, Any]:
    """Defaults of annotated attributes, and of the arguments of the constructor."""
    defaults: dict[str, Any] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            defaults[statement.target.id] = _literal_value(statement.value)
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            defaults |= dict(_defaults_of(statement.args))
    return defaults


def _defaults_of(arguments: ast.arguments) -> Iterator[tuple[str, Any]]:
    """Names and defaults of arguments; MISSING for defaults that are no literals."""
    positional = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [*zip(positional, arguments.defaults, strict=True)]
    pairs += [
        (argument, default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    ]
    for argument, default in pairs:
        yield argument.arg, _literal_value(default)


def _literal_value(node: ast.expr | None) -> Any:
    """The value of a literal expression; MISSING for another."""
    if node is None:
        return MISSING
    try:
        return ast.literal_eval(node)
    except (TypeError, *UNPARSABLE):
        return MISSING


def _names_that_code_reads(node: ast.ClassDef) -> set[str]:
    """Names that the methods of a class read, and texts, without values that are only kept.

    Kept is what `self.x = x` and `super().__init__(x=x)` do.
    """
    names: set[str] = set()
    kept: list[ast.expr] = []
    for part in ast.walk(node):
        if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Attribute):
            kept += _if_plain_copy(part.value, name=part.targets[0].attr)
        elif isinstance(part, ast.keyword):
            kept += _if_plain_copy(part.value, name=part.arg)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            names.add(part.value)
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load):
            names.add(part.attr)
    passed = {id(value) for value in kept}
    for part in ast.walk(node):
        if not isinstance(part, ast.Name) or isinstance(part.ctx, ast.Store):
            continue
        if id(part) not in passed:
            names.add(part.id)
    return names


def _if_plain_copy(value: ast.expr, *, name: str | None) -> list[ast.expr]:
    """The value if it is just the variable of this name."""
    return [value] if isinstance(value, ast.Name) and value.id == name else []
