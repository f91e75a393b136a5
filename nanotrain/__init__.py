"""Pretraining of GPT models: configuration, topology, data, model, sharded optimizer, checkpoints.

The names below are imported on first use, so `import nanotrain` stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanotrain.comm.parallel_context import ParallelContext
    from nanotrain.config.config import Config
    from nanotrain.config.load import load_config
    from nanotrain.errors import NanotrainError
    from nanotrain.topology.topology import Topology

__all__ = ["Config", "NanotrainError", "ParallelContext", "Topology", "load_config"]
MODULES = {
    "Config": "nanotrain.config.config",
    "NanotrainError": "nanotrain.errors",
    "ParallelContext": "nanotrain.comm.parallel_context",
    "Topology": "nanotrain.topology.topology",
    "load_config": "nanotrain.config.load",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in MODULES:
        raise AttributeError(f"nanotrain has no public name {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return list(__all__)
