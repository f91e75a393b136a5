"""Pretraining of GPT models: configuration, topology, data, model, sharded optimizer, checkpoints.

    config = nanotrain.configure("tiny", train_iters=100)
    history = nanotrain.pretrain(config)
    print(nanotrain.load_checkpoint(history.folder).generate("def "))

The names below are imported on first use, so `import nanotrain` stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanotrain.comm.parallel_context import ParallelContext
    from nanotrain.config.config import Config
    from nanotrain.config.load import configure, load_config
    from nanotrain.errors import NanotrainError
    from nanotrain.inference.checkpoint import load_checkpoint
    from nanotrain.sharded_module import ShardedModule
    from nanotrain.topology.topology import Topology
    from nanotrain.train.main import pretrain

MODULES = {
    "Config": "nanotrain.config.config",
    "NanotrainError": "nanotrain.errors",
    "ParallelContext": "nanotrain.comm.parallel_context",
    "ShardedModule": "nanotrain.sharded_module",
    "Topology": "nanotrain.topology.topology",
    "configure": "nanotrain.config.load",
    "load_checkpoint": "nanotrain.inference.checkpoint",
    "load_config": "nanotrain.config.load",
    "pretrain": "nanotrain.train.main",
}
__all__ = [
    "Config",
    "NanotrainError",
    "ParallelContext",
    "ShardedModule",
    "Topology",
    "configure",
    "load_checkpoint",
    "load_config",
    "pretrain",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in MODULES:
        raise AttributeError(f"nanotrain has no public name {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return list(__all__)
