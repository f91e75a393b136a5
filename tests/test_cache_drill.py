"""scripts/cache_drill: readers that share a cache are killed; many objects with odd names."""

import subprocess
import sys

import pytest

from tests.scripts import SCRIPTS

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")


def test_readers_that_share_a_cache_survive_the_kills_of_others() -> None:
    words = ["--kills", "2", "--processes", "2", "--objects", "12"]
    finished = subprocess.run(
        [sys.executable, SCRIPTS / "cache_drill", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "2 kills, " in finished.stdout and " 0 faults" in finished.stdout
    assert "12 objects: 0 differ after the mirror, 0 are left" in finished.stdout
