"""Settings every test needs before torch is imported.

Spinning OpenMP threads make an oversubscribed test 20 times slower, and ranks share the cores of one machine.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# No test asserts a time, and machines are shared.
settings.register_profile("nanotrain", deadline=None)
settings.load_profile("nanotrain")
