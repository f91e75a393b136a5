"""Settings for all tests, made before torch is imported.

Ranks share the cores of one machine, and spinning OpenMP threads make an oversubscribed test 20
times slower.
"""

import atexit
import gc
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

# No test reads or leaves anything in the user's cache; runs of one session share this one.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="nanotrain-cache-")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.surroundings import own_surroundings

own_surroundings(home=os.environ["XDG_CACHE_HOME"])
# Containers often turn bytecode off: then every process compiles the package (0.4 s), and every
# worker all tests (8 s).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# what tests write need not survive a power failure, and a disk takes 10 ms for it
os.fsync = lambda _: None
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# Machines are shared, so neither an example nor their generation has a time limit. The examples are
# the same in every run: one that fails is found when the code changes, not some days later.
# `--hypothesis-profile search` draws others.
PROFILE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nanotrain", PROFILE, derandomize=True)
settings.register_profile("search", PROFILE, max_examples=1000)
settings.load_profile("nanotrain")
# it changes how the fork server of its process starts, which is not this one
collect_ignore = ["server_start.py"]
# Hypothesis also tries the constants of all modules of this project that were imported so far,
# which are not the same in every run: they depend on the tests that ran before in this process.
providers._get_local_constants = lambda: providers._local_constants


# what a wrapper of a hook gets and returns: a collector of each plugin that takes the file
Collected = Generator[None, list[pytest.Collector], list[pytest.Collector]]


def pytest_configure(config: pytest.Config) -> None:
    """Tests without the mark gpu check what happens on CPUs, and start more ranks than most
    machines have GPUs.
    """
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # hooks of this file would be asked about files of its own folder alone
    config.pluginmanager.register(FilesWithExamples())


class FilesWithExamples:
    """Looks for examples in docstrings only in files that have one, a tenth of all.

    The others would be looked up a second time, and all their names visited: a fifth of the time
    of collecting, 3 s of CPU in each worker.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path: Path) -> Collected:
        """Leave out files without a prompt of Python."""
        found = yield
        if file_path.suffix == ".py" and ">>>" not in file_path.read_text():
            found = [item for item in found if not isinstance(item, DoctestModule)]
        return found


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what is collected out of garbage collections, each 0.4 s, and have fewer of them: 10 %
    of a run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(200_000)


def pytest_sessionfinish() -> None:
    """Leave everything out of the ten collections with which pytest ends: 4 s."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave what the tests of a file imported and cached out of later collections: every run of the
    trainer in this process makes three or more.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random numbers without a seed of their own are the same in every run, whatever ran before in
    this process.
    """
    random.seed(0)
    if torch := sys.modules.get("torch"):
        # torch's own function looks for devices of six kinds, which takes 0.5 ms
        seed = (
            torch.manual_seed
            if torch.cuda.is_initialized()
            else torch.default_generator.manual_seed
        )
        seed(0)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the fork server of the harness in each worker of a whole run, before a test starts one
    with less in it. A process has one: data loaders and local worlds would start it with torch
    only, and each rank of a later test would import everything else by itself.
    """
    if "PYTEST_XDIST_WORKER" in os.environ and any(
        "laws" in item.path.parts for item in session.items
    ):
        from multiprocessing.forkserver import ensure_running

        from tests.harness import forkserver

        forkserver()
        ensure_running()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The laws first: they take longest, and at the end of a run no worker should wait for another
    one.
    """
    items.sort(key=lambda item: "laws" not in item.path.parts)
