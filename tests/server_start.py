"""Imported by the fork server of the harness alone: what it forked starts processes from it too.

A forked process would start a server of its own, which imports everything again: 2 s for torchrun's agent and for the
data workers of every rank. It reads a configuration, which imports Hydra and fills caches: 0.14 s for every process.
"""

from multiprocessing import forkserver

from nanotrain.config.load import load

forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
load(["+config=tiny", "--mock-data"])
