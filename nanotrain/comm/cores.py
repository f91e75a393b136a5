"""The processor cores that a rank may use for work on the host."""

import os


def cores_per_rank() -> int:
    """The cores of this process, shared by the ranks of the machine (LOCAL_WORLD_SIZE of torchrun); at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, cores // int(ranks)) if ranks.isdecimal() and int(ranks) else cores
