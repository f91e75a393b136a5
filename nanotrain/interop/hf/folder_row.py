"""The row of a family that lies beside the config.json of a folder, in nanotrain_family.yaml.

    read_folder_row   the row, checked value by value: a downloaded folder may hold anything
    write_row         the same as text
    require_readable  whether a row can be written and read back

`nanotrain family add` writes it. A row is data: it names entries, tensors and parts of the package.
"""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nanotrain.config.schema import KEYS
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.parts import PARTS
from nanotrain.untrusted import (
    list_of,
    object_of,
    own_file,
    parse_yaml,
    plain_text,
    read_file,
    shown,
    text_of,
    unreadable,
    whole_number,
)

ROW_FILE = "nanotrain_family.yaml"
MAX_ROW_BYTES = 1 << 16  # the longest row of families.yaml has 6 kB
MAX_ITEMS = 256
MAX_GROUPS = 1024  # parts that the rows of a tensor are stored in
# fields of a tensor with few values; values of `groups` are attributes of `ModelShape`
VALUES = {"groups": ("num_heads", "query_groups"), "unsqueezed": ([0], [1])}
FLAGS = ("transposed", "is_full", "has_neighbour_pairs", "has_swapped_halves")
_LAYER = re.compile(r"[\w.]{0,80}\{layer\}[\w.]{0,80}")
_PATTERN = re.compile(r"[\w.*]{1,120}")
_WORD = re.compile(r"[\w.{}-]{1,160}")


class FolderRow(NamedTuple):
    """A row, its `model_type`, and the text of its file."""

    kind: str
    row: dict[str, Any]
    text: str


def read_folder_row(folder: Path, *, known: Collection[str]) -> FolderRow | None:
    """The row of a folder; None where it has none.

    Args:
        folder: the folder of a model.
        known: the rows that it may start from.

    Raises:
        HuggingFaceError: the file is no row.
    """
    path = folder / ROW_FILE
    if not path.exists() and not path.is_symlink():
        return None
    try:
        text = read_file(own_file(path), most=MAX_ROW_BYTES).decode()
        return _parse_row(text, known=known)
    except (OSError, ValueError) as error:
        reason = unreadable(error)
        fix = f"remove it, and write it anew: nanotrain family add {folder}"
        raise HuggingFaceError(f"{path} is no row of a family", why=reason, fix=fix) from None


def _parse_row(text: str, *, known: Collection[str]) -> FolderRow:
    """The row in the text of a file; ValueError if it is none."""
    families = object_of(object_of(parse_yaml(text), "it").get("families"), "families")
    if len(families) != 1:
        raise ValueError(f"it has {len(families)} families, it must have one")
    kind, row = next(iter(families.items()))
    return FolderRow(_parse_name(kind, "model_type"), _parse_tables(row, known=known), text)


def require_readable(kind: str, row: Mapping[str, Any], *, known: Collection[str]) -> None:
    """Check that a row can be written, and that its file is one that `read_folder_row` reads.

    Raises:
        HuggingFaceError: names or values of the row cannot be in a file.
    """
    try:
        text = write_row(kind, row)
        if len(text.encode()) > MAX_ROW_BYTES:
            raise ValueError(f"it has more than {MAX_ROW_BYTES:,} bytes")
        _parse_row(text, known=known)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise HuggingFaceError(
            f"the row of {shown(kind)} cannot be in a file",
            why=plain_text(str(error))[:200],
            fix="change what config.json or its configuration file has there",
        ) from None


def write_row(kind: str, row: Mapping[str, Any], *, comments: Collection[str] = ()) -> str:
    """The text of a file with one row.

    >>> print(write_row("mine", {"from": ["llama_layout"], "parts": ["rope"]}), end="")
    families:
      mine:
        from: [llama_layout]
        parts: [rope]
    """
    table = {"families": {kind: dict(row)}}
    text = yaml.dump(table, Dumper=_Plain, sort_keys=False, default_flow_style=None, width=96)
    lines = [f"# {comment}" for comment in comments]
    return "\n".join([*lines, text])


class _Plain(yaml.SafeDumper):
    """A dumper that writes no aliases, which `parse_yaml` refuses."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value where it is."""
        return True


def _parse_tables(row: Any, *, known: Collection[str]) -> dict[str, Any]:
    """A row whose every table has the expected types."""
    checks = _CHECKS | {"from": lambda value: _parse_list(value, "from", known=known)}
    checked = {}
    for name, value in object_of(row, "the row").items():
        if name not in checks:
            raise ValueError(f"{shown(name)} is no table of a row")
        checked[name] = checks[name](value)
    for name in ("architecture", "from", "layers", "parts"):
        if name not in checked:
            raise ValueError(f"it has no {name}")
    return checked


def _parse_name(value: Any, field: str) -> str:
    """Check that a value is a name."""
    text = text_of(value, field)
    if not _WORD.fullmatch(text):
        raise ValueError(f"{field} is {shown(text)}, it must be a name")
    return text


def _parse_list(value: Any, field: str, *, known: Collection[str] | None = None) -> list[str]:
    """A list of names, or of patterns of names."""
    items = list_of(value, field)
    if len(items) > MAX_ITEMS:
        raise ValueError(f"{field} has {len(items)} items, at most {MAX_ITEMS} are read")
    for item in items:
        text = text_of(item, field)
        if known is None and not _PATTERN.fullmatch(text):
            raise ValueError(f"{field} has {shown(item)}, which is no pattern of names")
        if known is not None and text not in known:
            raise ValueError(f"{field} has {shown(item)}, which nanotrain does not know")
    return items


def _parse_names(value: Any, field: str) -> dict[str, str]:
    """A table of names."""
    table = object_of(value, field)
    return {_parse_name(name, field): _parse_name(other, field) for name, other in table.items()}


def _parse_keys(value: Any, field: str) -> dict[str, str]:
    """Entries -> keys of the model section."""
    table = _parse_names(value, field)
    for key in table.values():
        _require_key(key)
    return table


def _parse_entries(value: Any, field: str) -> dict[str, Any]:
    """A table of entries of config.json with any values."""
    table = object_of(value, field)
    for name in table:
        _parse_name(name, field)
    return table


def _parse_fixed(value: Any) -> dict[str, Any]:
    """Check that the table `fixed` has keys of the model section."""
    table = object_of(value, "fixed")
    for key in table:
        _require_key(key)
    return table


def _require_key(key: str) -> None:
    if f"model.{key}" not in KEYS:
        raise ValueError(f"{shown(key)} is no setting of the model section")


def _parse_required(value: Any) -> dict[str, list[Any]]:
    table = object_of(value, "required")
    return {_parse_name(name, "required"): list_of(values, name) for name, values in table.items()}


def _parse_layer(value: Any) -> str:
    """Check that a value is a name pattern of layers."""
    text = text_of(value, "layer")
    if not _LAYER.fullmatch(text):
        raise ValueError(f"layer is {shown(text)}, it must be a name with {{layer}}")
    return text


def _parse_layers(value: Any) -> dict[str, Any]:
    """Modules -> names of tensors, or tables with `HFName`'s fields."""
    table = object_of(value, "layers")
    for module, name in table.items():
        _parse_name(module, "layers")
        if not isinstance(name, dict):
            _parse_name(name, "layers")
            continue
        for field, part in name.items():
            _check_name_field(field, part)
    return table


def _check_name_field(field: str, value: Any) -> None:
    if field == "name":
        _parse_name(value, field)
    elif field == "fused":
        _parse_list(value, field)
    elif value in VALUES.get(field, ()):
        return
    elif field == "groups" and type(value) is int:
        whole_number(value, field, low=1, high=MAX_GROUPS)
    elif field not in FLAGS or not isinstance(value, bool):
        raise ValueError(f"a tensor of layers has {shown(field)}: {shown(value)}")


def _parse_constants(value: Any) -> dict[str, float]:
    """Names of scalars -> their values."""
    table = object_of(value, "constants")
    for name, number in table.items():
        _parse_name(name, "constants")
        if type(number) not in (int, float):
            raise ValueError(f"{shown(name)} is {shown(number)}, it must be a number")
    return table


def _parse_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{shown(value)} must be true or false")
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "architecture": lambda value: _parse_name(value, "architecture"),
    "constants": _parse_constants,
    "defaults": lambda value: _parse_entries(value, "defaults"),
    "ends": lambda value: _parse_names(value, "ends"),
    "entries": lambda value: _parse_keys(value, "entries"),
    "fixed": _parse_fixed,
    "ignored": lambda value: _parse_list(value, "ignored"),
    "ignores_later_layers": _parse_flag,
    "layer": _parse_layer,
    "layers": _parse_layers,
    "parts": lambda value: _parse_list(value, "parts", known=PARTS),
    "passed_over": lambda value: _parse_list(value, "passed_over"),
    "prefix": lambda value: _parse_name(value, "prefix"),
    "renamed": lambda value: _parse_names(value, "renamed"),
    "required": _parse_required,
    "without_class": _parse_flag,
    "written": lambda value: _parse_entries(value, "written"),
}
