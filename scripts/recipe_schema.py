"""configs/recipe.schema.json: the JSON schema of recipes, by which editors complete and check.

Usage: `python -m scripts.recipe_schema configs/recipe.schema.json`

A recipe names it in its second line: `# yaml-language-server: $schema=../recipe.schema.json`.
"""

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.option import Entry, section_help
from nanotrain.config.schema import SECTIONS, entries_of

TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
# numbers may be written as texts that YAML does not read as numbers, as 1e-4
NUMBER_TEXT = {"type": "string", "pattern": r"^[-+]?[0-9.]+([eE][-+]?[0-9]+)?$"}
REFERENCE = {"type": "string", "pattern": r"^\$\{.+\}$"}  # a value of another key


def recipe_schema() -> dict[str, Any]:
    """The schema of a file that `+config=` names: a defaults list, and values of sections."""
    sections = {field.name: section_schema(field.name) for field in fields(Config)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "recipe of nanotrain",
        "type": "object",
        "properties": {"defaults": {"type": "array"}, **sections},
        "additionalProperties": False,
    }


def section_schema(name: str) -> dict[str, Any]:
    """The schema of a section, with the sections in it."""
    properties = {entry.field.name: value_schema(entry) for entry in entries_of(name)}
    for other in SECTIONS:
        parent, _, last = other.rpartition(".")
        if parent == name:
            properties[last] = section_schema(other)
    return {
        "description": section_help(SECTIONS[name]),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def value_schema(entry: Entry) -> dict[str, Any]:
    """The schema of one field: type, choices, default and help."""
    item = item_schema(entry)
    forms = [item, REFERENCE]
    if entry.kind is list:
        forms = [{"type": "array", "items": item}, item, REFERENCE]
    if entry.is_optional:
        forms.append({"type": "null"})
    check = entry.field.metadata["check"]
    bound = f"; {check.__doc__}" if check is not None else ""
    return {
        "description": f"{entry.help}{bound}",
        "default": entry.default,
        "anyOf": forms,
    }


def item_schema(entry: Entry) -> dict[str, Any]:
    """The schema of one value of a field."""
    if entry.choices:
        return {"enum": list(entry.choices)}
    if entry.item is float:
        return {"anyOf": [{"type": "number"}, NUMBER_TEXT]}
    if entry.item is str:
        return {"type": ["string", "number", "boolean"]}
    return {"type": TYPES[entry.item]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="file that is written")
    FILE = parser.parse_args().file
    FILE.write_text(json.dumps(recipe_schema(), indent=1) + "\n")
