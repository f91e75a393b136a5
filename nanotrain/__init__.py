"""Pretraining of GPT models: configuration, topology, data, model, sharded optimizer, checkpoints.

    config = nanotrain.configure("tiny", train_iters=100)
    history = nanotrain.pretrain(config)
    print(nanotrain.load_checkpoint(history.folder).generate("def "))

The names below are imported on first use, so `import nanotrain` stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanotrain.comm.parallel_context import ParallelContext as ParallelContext
    from nanotrain.config.config import Config as Config
    from nanotrain.config.load import configure as configure
    from nanotrain.config.load import load_config as load_config
    from nanotrain.errors import NanotrainError as NanotrainError
    from nanotrain.inference.checkpoint import load_checkpoint as load_checkpoint
    from nanotrain.optim.sharded_module import ShardedModule as ShardedModule
    from nanotrain.topology.topology import Topology as Topology
    from nanotrain.train.main import pretrain as pretrain

MODULES = {
    "Config": "nanotrain.config.config",
    "NanotrainError": "nanotrain.errors",
    "ParallelContext": "nanotrain.comm.parallel_context",
    "ShardedModule": "nanotrain.optim.sharded_module",
    "Topology": "nanotrain.topology.topology",
    "configure": "nanotrain.config.load",
    "load_checkpoint": "nanotrain.inference.checkpoint",
    "load_config": "nanotrain.config.load",
    "pretrain": "nanotrain.train.main",
}
__all__ = list(MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in MODULES:
        raise AttributeError(f"nanotrain has no public name {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
