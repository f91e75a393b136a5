"""Drills of `scripts/two_hosts`; they take a minute of processor time each, so they run only when
asked for.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "two_hosts"
DRILLS = "NANOTRAIN_DRILLS"


@pytest.mark.parametrize(
    "drill",
    [["resume"], ["memory"], ["shrink"], ["shrink", "--localhost", "--ranks-per-host", "1"]],
    ids=" ".join,
)
def test_a_killed_host_costs_no_more_than_the_steps_since_the_last_save(drill: list[str]) -> None:
    if not os.environ.get(DRILLS):
        pytest.skip(f"set {DRILLS}=1 to run it")
    finished = subprocess.run(
        [sys.executable, SCRIPT, *drill], capture_output=True, text=True, check=False
    )
    if finished.returncode == 77:
        pytest.skip(finished.stdout.strip())
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "60 steps; losses differ from those of one rank by at most" in finished.stdout


def test_a_system_without_namespaces_is_a_reason_to_skip_not_a_success(tmp_path: Path) -> None:
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    for name in ("ip", "nsenter"):
        (tmp_path / name).symlink_to("/bin/true")
    for path, reason in (
        (tmp_path, "Operation not permitted"),
        (tmp_path / "none", "unshare, nsenter, ip not installed"),
    ):
        environment = {"PATH": str(path)}
        finished = subprocess.run(
            [sys.executable, SCRIPT, "resume"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (
            finished.returncode == 77
            and finished.stdout.startswith("skipped: ")
            and reason in finished.stdout
        )
