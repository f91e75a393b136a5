"""Freed memory is kept: a later block of the same size has no new pages."""

import subprocess
import sys

import pytest

# Of the second of two equal rounds: page faults, which clear pages of 4 KiB.
PROGRAM = """
import ctypes, resource
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page would be one fault
from nanotrain.comm.host_memory import keep_freed_memory
print(keep_freed_memory())
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for megabytes in (1, 40, 8, 60):
        bytearray(b"x" * (megabytes * 2**20))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


def _run(**environment: str) -> tuple[bool, int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_a_second_round_of_large_blocks_takes_no_pages_from_the_system():
    kept, faults = _run()
    assert kept
    assert faults < 1000  # 218 MB are 55,808 pages


def test_settings_of_the_environment_are_left_alone():
    kept, faults = _run(MALLOC_MMAP_THRESHOLD_="131072")
    assert not kept
    assert faults > 10_000
