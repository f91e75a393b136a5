"""The tables of families.yaml, which describes each of them, and of models.yaml."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLES, MODELS = (Path(__file__).with_name(name) for name in ("families.yaml", "models.yaml"))


@cache
def read_tables(path: Path = TABLES) -> Any:
    """The content of families.yaml, or of a file like it."""
    return yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
