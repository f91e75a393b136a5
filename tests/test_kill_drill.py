"""scripts/kill_drill: it finds what it looks for. The drill itself takes minutes, so it runs only
when asked for.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.checkpoint.test_store import save, shard
from tests.scripts import SCRIPTS, load_script
from tests.test_two_hosts import DRILLS


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("kill_drill")


def test_the_drill_kills_and_resumes() -> None:
    if not os.environ.get(DRILLS):
        pytest.skip(f"set {DRILLS}=1 to run it")
    finished = subprocess.run(
        [sys.executable, SCRIPTS / "kill_drill", "--instants", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("| 2 |\n") == 6


def test_instants_are_spread_over_the_calls_of_both_ranks(script: ModuleType) -> None:
    instants = script.instants_of([["a"] * 100, ["a"] * 50], 20)
    assert [instant for rank, instant in instants if rank == 0] == [
        2,
        12,
        22,
        32,
        42,
        52,
        62,
        72,
        82,
        92,
    ]
    assert [instant for rank, instant in instants if rank == 1] == [
        3,
        8,
        13,
        18,
        23,
        28,
        33,
        38,
        43,
        48,
    ]


def test_a_lost_or_damaged_checkpoint_is_found(script: ModuleType, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        path = save(tmp_path, step, keep_last=2)
    assert script.fault_of_checkpoints(str(tmp_path)) == (6, None)
    older = path.with_name("step-00000004")
    content = bytearray(shard(older).read_bytes())
    content[-1] ^= 1
    shard(older).write_bytes(content)
    assert "UNSOUND, 1 fault" in script.fault_of_checkpoints(str(tmp_path))[1]
    os.truncate(shard(older), 300)
    assert script.fault_of_checkpoints(str(tmp_path)) == (
        6,
        "the newest complete checkpoints are of steps [6]",
    )


def test_a_difference_after_the_resume_is_found(script: ModuleType, tmp_path: Path) -> None:
    save(tmp_path, 8)
    rows = [dict.fromkeys(script.COMPARED, number) for number in range(3)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({**row, "time": 1.0}) + "\n" for row in rows)
    )
    state = script.state_of(str(tmp_path))
    assert script.differs(state, state) is None
    changed = {name: tensor.nextafter(torch.tensor(torch.inf)) for name, tensor in state[1].items()}
    assert script.differs((rows, changed, state[2]), state) == "1 tensors differ"
    assert script.differs((rows[1:], *state[1:]), state) == "the rows of metrics.jsonl differ"
    more = (*state[:2], ["step-00000006", *state[2]])
    assert "the checkpoints folder has" in script.differs(more, state)
    assert script.differs(more, state, is_complete=True) is None
    assert "the checkpoints folder has" in script.differs(state, more, is_complete=True)


def test_processes_that_are_left_are_found(script: ModuleType) -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        assert process.pid in script.children()
    finally:
        process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.pid not in script.children(), "it has ended and was not waited for"
    process.wait()
