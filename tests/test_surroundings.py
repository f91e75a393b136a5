"""Tests run alike under nohup, in the background, as a service, and in jobs of clusters."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.surroundings import own_surroundings

ROOT = Path(__file__).parents[1]
# each depends on what a process inherits: signals, umask, width and language of a terminal, stdin
SAMPLE = [
    "tests/launch/test_start_ranks.py::test_a_closed_terminal_is_passed_on_as_a_stop_but_not_under_nohup",
    "tests/train/test_fit.py::test_a_signal_finishes_the_step_and_saves",
    "tests/runs/test_files.py",
    "tests/topology/test_grid_drawing.py",
]
FOREIGN = {
    "HOME": "/nonexistent",
    "LANG": "C",
    "LC_ALL": "POSIX",
    "TZ": "Asia/Kathmandu",
    "COLUMNS": "20",
    "CUDA_VISIBLE_DEVICES": "7",
    "RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "nowhere",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "HF_TOKEN": "secret",
    "AWS_ACCESS_KEY_ID": "somebody",
    "NANOTRAIN_CONFIG_DIR": "/nonexistent",
}
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def leave_nothing() -> None:
    """In the child: ignored and blocked signals, a strict umask, no stdin."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    os.umask(0o077)
    os.close(0)


def test_foreign_settings_go_and_those_of_the_tests_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOTRAIN_CONFIG_DIR", "/nonexistent")
    monkeypatch.setenv("NANOTRAIN_DRILLS", "1")
    own_surroundings(home=os.environ["HOME"])
    assert "NANOTRAIN_CONFIG_DIR" not in os.environ
    assert os.environ["NANOTRAIN_DRILLS"] == "1"


def test_a_sample_passes_whatever_the_process_inherits() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *SAMPLE]
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    tests = subprocess.run(
        command,
        cwd=ROOT,
        env=environment | FOREIGN,
        preexec_fn=leave_nothing,
        capture_output=True,
        text=True,
        check=False,
    )
    assert tests.returncode == 0, tests.stdout[-4000:] + tests.stderr[-1000:]
