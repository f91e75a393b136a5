"""Drill of `scripts/restart_drill`; it takes minutes, so it runs only when asked for."""

import os
import subprocess
import sys

import pytest

from tests.scripts import SCRIPTS
from tests.test_two_hosts import DRILLS


def test_a_restart_in_place_is_sound_and_quicker_than_one_of_all_ranks() -> None:
    if not os.environ.get(DRILLS):
        pytest.skip(f"set {DRILLS}=1 to run it")
    finished = subprocess.run(
        [sys.executable, SCRIPTS / "restart_drill"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = [line.split("|")[1:3] for line in finished.stdout.splitlines()[2:]]
    seconds = {name.strip(): float(text) for name, text in rows}
    assert seconds["killed, in place"] < seconds["killed, all ranks start again"]
