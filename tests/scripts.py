"""The Python programs of scripts/, which have no file ending, as modules."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load_script(name: str) -> ModuleType:
    """Import `scripts/name` under its name."""
    loader = SourceFileLoader(name, str(SCRIPTS / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    # where its dataclasses look for their module
    module = sys.modules[loader.name] = module_from_spec(spec)
    loader.exec_module(module)
    return module
