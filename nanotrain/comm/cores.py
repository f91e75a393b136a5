"""The processor cores that a rank may use for work on the host."""

import os

from nanotrain.system.host import usable_cores


def cores_per_rank() -> int:
    """The cores of this process, shared by the ranks of the machine (LOCAL_WORLD_SIZE of torchrun); at least 1."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, usable_cores() // (int(ranks) or 1)) if ranks.isdecimal() else usable_cores()
