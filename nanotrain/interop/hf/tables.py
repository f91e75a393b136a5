"""The tables of families.yaml, models.yaml and effects.yaml, each described in its file."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLES = Path(__file__).with_name("families.yaml")
MODELS = Path(__file__).with_name("models.yaml")
EFFECTS = Path(__file__).with_name("effects.yaml")


@cache
def read_tables(path: Path = TABLES) -> Any:
    """The content of families.yaml, or of a file like it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_bytes(), Loader=loader)
