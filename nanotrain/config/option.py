"""Declare the fields and nested sections of the configuration.

option, section    declare a field, with its docstring below it, or a nested section
Entry              a declared field: its names, type, default and help
section_help, field_help     the docstrings of a section and of its fields
at_least, above, between, url     checks of values
"""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit


def option(
    default: Any,
    *,
    name: str = "",
    check: Callable[[Any], bool] | None = None,
    secret: str = "",
    is_path: bool | Literal["or address"] = False,
) -> Any:
    """Declare one field; the only place of its default.

    The docstring below the field is its line in `--help` and docs/config.md.

    Args:
        default: the value where no file and no argument sets one.
        name: unique name behind the flag, where it is not the section's prefix and the field's own
            name.
        check: bound on the value; a value that fails it is a `ConfigError`.
        secret: environment variable to which files refer in place of the value; empty: the value is
            written.
        is_path: True: the value is a path, in which `~` and $VARIABLES are replaced; "or address":
            it may also be an address in object storage.
    """
    metadata = {"check": check, "name": name, "secret": secret, "is_path": is_path}
    if isinstance(default, list):
        # a list has no hash; sections are compared by `==`
        return field(default_factory=lambda: list(default), metadata=metadata, hash=False)
    return field(default=default, metadata=metadata)


def section(kind: type, *, prefix: str = "", switch: str = "", value: str = "") -> Any:
    """Declare a nested section by its frozen dataclass.

    Args:
        kind: the dataclass.
        prefix: prefix of the unique names of its fields, as "moe_" of `--moe-router-topk`.
        switch: field, of the section or of its parent, without which the section is absent (None);
            empty: never absent.
        value: value of the switch with which the section is present; empty: any but unset and off.
    """
    metadata = {"section": kind, "prefix": prefix, "switch": switch, "value": value}
    if switch:
        return field(default=None, metadata=metadata)
    return field(default_factory=kind, metadata=metadata)


def section_help(kind: type) -> str:
    """The docstring of a section in one line."""
    return " ".join((kind.__doc__ or "").split())


@cache
def field_help(kind: type) -> dict[str, str]:
    """The docstrings of a section's fields, by name, each in one line."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):  # the last one is object
        texts |= docstrings_below_fields(base.__module__).get(base.__qualname__, {})
    return texts


@cache
def docstrings_below_fields(module: str) -> dict[str, dict[str, str]]:
    """The texts below the annotated names of every class of a module, read from its source.

    Python does not keep them. Only help and errors ask for them, so a start does not read them.
    """
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:  # an installation without sources has no texts
        return {}
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            texts[node.name] = dict(documented_names(node))
    return texts


def documented_names(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The annotated names of a class with a text below them, and that text in one line."""
    for declaration, below in pairwise(node.body):
        match declaration, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                yield name, " ".join(text.split())


def flag_of(name: str) -> str:
    """The flag of a field's unique name.

    >>> flag_of("tensor_model_parallel_size")
    '--tensor-model-parallel-size'
    """
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Entry:
    """One field of the configuration."""

    section: str  # dotted name of its section, as "model.moe"
    section_class: type
    field: Field[Any]
    prefix: str = ""  # prefix of its unique name

    @cached_property
    def name(self) -> str:
        """The field's unique name over all sections, the one behind its flag."""
        return self.field.metadata["name"] or self.prefix + self.field.name

    @cached_property
    def key(self) -> str:
        """The field's dotted name, `section.field`."""
        return f"{self.section}.{self.field.name}"

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def help(self) -> str:
        """The help text of the field: the docstring below it."""
        return field_help(self.section_class).get(self.field.name, "described in docs/config.md")

    @property
    def advice(self) -> str:
        """The field's flag and its meaning, for the cure of an error."""
        return f"{self.flag} is {self.help}"

    @property
    def secret(self) -> str:
        """The environment variable to which files refer; empty for most fields."""
        return str(self.field.metadata["secret"])

    @property
    def is_path(self) -> bool:
        return bool(self.field.metadata["is_path"])

    @property
    def takes_address(self) -> bool:
        """Whether the field takes an address in object storage."""
        return bool(self.field.metadata["is_path"] == "or address")

    @property
    def is_optional(self) -> bool:
        return self.default is None

    @cached_property
    def kind(self) -> Any:
        """The type of a value that is not None: bool, int, float, str, list or a Literal."""
        declared = self.field.type
        if get_origin(declared) in (Union, UnionType):
            declared = next(kind for kind in get_args(declared) if kind is not type(None))
        return list if get_origin(declared) is list else declared

    @cached_property
    def item(self) -> Any:
        """The type of one value: of a list the type of its items."""
        return get_args(self.field.type)[0] if self.kind is list else self.kind

    @cached_property
    def choices(self) -> tuple[str, ...]:
        """The values of a field that takes a few names."""
        return get_args(self.item) if get_origin(self.item) is Literal else ()

    @property
    def default(self) -> Any:
        """The value where no file and no argument sets one."""
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()


def at_least(bound: float, *, at_most: float | None = None) -> Callable[[Any], bool]:
    """A check that passes numbers from `bound` on, up to `at_most`, and None."""
    if at_most is None:
        return _check(f"must be at least {bound}", lambda value: value >= bound)
    return _check(
        f"must be at least {bound} and at most {at_most}", lambda value: bound <= value <= at_most
    )


def above(bound: float, *, at_most: float | None = None) -> Callable[[Any], bool]:
    """A check that passes numbers above `bound`, up to `at_most`, and None."""
    if at_most is not None:
        return _check(
            f"must be above {bound} and at most {at_most}", lambda value: bound < value <= at_most
        )
    return _check(f"must be above {bound}", lambda value: value > bound)


def between(low: float, high: float) -> Callable[[Any], bool]:
    """A check that passes numbers in [low, high), and None."""
    return _check(f"must be at least {low} and below {high}", lambda value: low <= value < high)


def url() -> Callable[[Any], bool]:
    """A check that passes http and https addresses, and None."""
    return _check(
        "must begin with http:// or https://, then a host, and a port from 1 to 65535 if any",
        _is_url,
    )


def _is_url(text: str) -> bool:
    """Whether a text is a complete http or https address."""
    try:
        parts = urlsplit(text)
        is_complete = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half an IPv6 address
        return False
    return (
        is_complete and parts.scheme in ("http", "https") and text.isprintable() and " " not in text
    )


def _check(requirement: str, is_met: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A check that passes None and values that meet a requirement, which its docstring states."""

    def check(value: Any) -> bool:
        return value is None or is_met(value)

    check.__doc__ = requirement
    return check
