"""Tables as YAML files: Megatron-LM's flags, names of other frameworks, contradictions, settings without effect, peaks.

It does not hold conversions of values: rows name functions of `config/conversions.py`.
"""

from pathlib import Path
from typing import Any


def read_table(name: str) -> Any:
    """The content of a file of this folder."""
    import yaml  # 10 ms, and 10 more for the larger table: both only for a command line that needs it

    path = Path(__file__).with_name(f"{name}.yaml")
    return yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
