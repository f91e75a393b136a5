"""scripts/disk_drill: a few of its system calls; all of them take minutes."""

import subprocess
import sys

import pytest

from tests.scripts import SCRIPTS


def test_calls_that_fail_and_kills_leave_no_half_corpus() -> None:
    words = ["--commands", "prepare", "--faults", "kill", "ENOSPC", "EIO", "--instants", "3"]
    finished = subprocess.run(
        [sys.executable, SCRIPTS / "disk_drill", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode == 77:
        pytest.skip(finished.stdout)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "| prepare | kill | 3 of " in finished.stdout
    assert "| prepare | ENOSPC | 3 of " in finished.stdout
