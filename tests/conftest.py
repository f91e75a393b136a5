"""Settings for all tests, made before torch is imported.

Ranks share the cores of one machine, and spinning OpenMP threads make an oversubscribed test 20 times slower.
"""

import os
import tempfile

# No test reads or leaves anything in the user's cache; runs of one session share this one.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="nanotrain-cache-")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

# Machines are shared, so neither an example nor their generation has a time limit. The examples are the same in every
# run: one that fails is found when the code changes, not some days later. `--hypothesis-profile search` draws others.
PROFILE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nanotrain", PROFILE, derandomize=True)
settings.register_profile("search", PROFILE, max_examples=1000)
settings.load_profile("nanotrain")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The laws first: they take longest, and at the end of a run no worker should wait for another one."""
    items.sort(key=lambda item: "laws" not in item.path.parts)
