"""A rank ends with torchrun, by the kernel's signal and by the thread that replaces it elsewhere."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.harness import HANG_S

RANK = """
import os, sys, time
from nanotrain.watch import launcher
if sys.argv[1] == "thread":
    launcher._signal_at_parent_death, launcher._POLL_S = lambda: False, 0.1
launcher.end_with_launcher({"TORCHELASTIC_RUN_ID": "1"} if sys.argv[1] != "shell" else {})
print(os.getpid(), flush=True)
time.sleep(60)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(status.stdout.strip()) and not status.stdout.startswith("Z")


@pytest.mark.parametrize(("by", "survives"), [("kernel", False), ("thread", False), ("shell", True)])
def test_a_killed_launcher_leaves_no_rank(by, survives):
    command = [sys.executable, "-c", LAUNCHER, RANK, by]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    rank = int(launcher.stdout.readline())
    try:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        end = time.monotonic() + (0.5 if survives else HANG_S)
        while is_running(rank) and time.monotonic() < end:
            time.sleep(0.05)
        assert is_running(rank) is survives
    finally:
        if is_running(rank):
            os.kill(rank, signal.SIGKILL)
