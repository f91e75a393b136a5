"""Imported by the fork server of the harness alone: what it forked starts processes from it too.

A forked process would start a server of its own, which imports everything again: 2 s for torchrun's
agent and for the data workers of every rank. It reads a configuration, which imports Hydra and
fills caches: 0.14 s for every process. A client of object storage reads what its provider offers:
0.1 s for every process. As in conftest.py no disk is waited for.
"""

import gc
import os
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver

from nanotrain.config.load import load

os.fsync = lambda _: None
forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
load(["+config=tiny", "--mock-data"])
with suppress(ImportError):
    from botocore.loaders import JSONFileLoader
    from botocore.session import Session

    read = cache(JSONFileLoader().load_file)
    JSONFileLoader.load_file = lambda _, path: read(path)
    Session().create_client("s3")
gc.freeze()  # the trainer collects garbage at its start; a walk over what was imported takes 0.2 s
gc.set_threshold(200_000)  # with the default collections are 12 % of a law test
