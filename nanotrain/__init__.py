"""Pretraining of GPT models: configuration, topology, data, model, sharded optimizer, checkpoints.

The names below are imported when they are first used, so `import nanotrain` costs nothing.
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
PLACES = {
    "Config": "nanotrain.config.config",
    "NanotrainError": "nanotrain.errors",
    "ParallelContext": "nanotrain.comm.parallel_context",
    "Topology": "nanotrain.topology.topology",
    "load_config": "nanotrain.config.load",
}


def __getattr__(name: str) -> Any:
    """Import a name of the public face from its room."""
    if name not in PLACES:
        raise AttributeError(f"nanotrain has no public name {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(PLACES[name]), name)


def __dir__() -> list[str]:
    """The public face."""
    return list(__all__)
