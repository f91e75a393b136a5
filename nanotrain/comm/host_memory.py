"""Keep freed host memory in the process, so that the next step does not request it from the system again.

glibc returns large freed blocks to the system. Every training step on a CPU frees and allocates the same activations,
and the system has to clear every page of them each time.
"""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP_ALL = 2**31 - 1  # bytes: the largest int
# Bytes: larger blocks are still mapped one by one. Older releases of glibc accept at most the second value.
_LARGEST_KEPT = (2**30, 2**25)
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let glibc keep the memory of freed blocks for later ones, for the rest of the process.

    The peak memory of the process does not change, but the process stays at its peak. Does nothing if the environment
    sets glibc's own variables, or with another C library.

    Returns:
        Whether glibc accepted the settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _SETTINGS):
        return False
    return any(mallopt(_M_MMAP_THRESHOLD, size) for size in _LARGEST_KEPT) and bool(
        mallopt(_M_TRIM_THRESHOLD, _KEEP_ALL)
    )
