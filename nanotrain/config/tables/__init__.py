"""Tables as YAML files: flags of Megatron-LM, names of other frameworks, patterns of layers, peaks.

It does not hold conversions of values: rows name functions of `config/conversions.py`.
"""

from functools import cache
from pathlib import Path
from typing import Any


@cache
def read_table(name: str, *, folder: Path = Path(__file__).parent) -> Any:
    """The content of a YAML file, of this folder or of another package's."""
    # 10 ms, and 10 more for the larger table: both only for a command line that needs it
    import yaml

    return yaml.load(
        (folder / f"{name}.yaml").read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
