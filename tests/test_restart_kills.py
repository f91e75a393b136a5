"""scripts/restart_kills: it finds what it looks for. The drill itself takes minutes, so it runs only
when asked for.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.scripts import SCRIPTS, load_script
from tests.test_two_hosts import DRILLS


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("restart_kills")


def test_runs_with_kills_end_as_one_without() -> None:
    if not os.environ.get(DRILLS):
        pytest.skip(f"set {DRILLS}=1 to run it")
    finished = subprocess.run(
        [sys.executable, SCRIPTS / "restart_kills", "--kills", "4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("| 1 |") >= 4


def test_kills_follow_from_the_seed_and_reach_all_phases_and_ranks(script: ModuleType) -> None:
    def draw_all(seed: int) -> list[Any]:
        draw = random.Random(seed)
        return [kill for phase in script.PHASES * 5 for kill in script.draw_kills(draw, phase, 2)]

    kills = draw_all(1)
    assert kills == draw_all(1) != draw_all(2)
    assert {(kill.phase, kill.rank) for kill in kills} == {
        (phase, rank) for phase in script.PHASES for rank in range(2)
    }


@pytest.fixture
def case(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run that was killed once, at second 100, and went on."""
    monkeypatch.setattr(script, "complete_checkpoints", lambda folder: [folder])
    monkeypatch.setattr(script, "read_manifest", lambda path: script.Plan(""))
    monkeypatch.setattr(script.Plan, "tensors", (), raising=False)
    monkeypatch.setattr(
        script, "read_global_tensors", lambda path, names: {"weight": torch.ones(2)}
    )
    case = script.Case(tmp_path, [script.Kill(0, script.STEP, 3, 0.5)])
    for folder in (case.run, case.notes):
        folder.mkdir()
    (case.notes / "kill-0").write_text(json.dumps({"time_s": 100.0, "is_inside": True}))
    restart = {"time_s": 100.5, "total_seconds": 2.0}
    (case.run / "restarts.jsonl").write_text(json.dumps(restart) + "\n")
    write_steps(case, range(1, script.STEPS + 1))
    return case


def write_steps(case: Any, steps: Any, *, loss: float = 1.0) -> None:
    rows = []
    for step in steps:
        row = {"step": step, "loss": loss, "grad_norm": 1.0}
        rows.append(json.dumps({**row, "consumed_samples": 8 * step, "skipped": False}))
    (case.run / "metrics.jsonl").write_text("\n".join(rows) + "\n")


def test_a_sound_run_and_its_seconds(script: ModuleType, case: Any) -> None:
    assert script.judge(case, {}, script.state_of(case.run)) == script.Outcome("", 2.5, True)


def test_losses_on_fewer_ranks_are_compared_within_rounding(script: ModuleType, case: Any) -> None:
    expected = script.state_of(case.run)
    case.may_leave = True
    starts = case.run / "starts.jsonl"
    starts.write_text('{"world_size": 2}\n' * 2)
    assert script.judge(case, {}, expected).fault == "no rank has left"
    write_steps(case, range(1, script.STEPS + 1), loss=2.0)
    assert script.judge(case, {}, expected).fault == "losses, norms or samples differ"
    starts.write_text('{"world_size": 2}\n{"world_size": 1}\n')
    for loss, fault in ((1.0 + 9e-7, ""), (1.0 + 2e-6, "losses, norms or samples differ")):
        write_steps(case, range(1, script.STEPS + 1), loss=loss)
        assert script.judge(case, {}, expected).fault == fault


def test_what_is_wrong_with_a_run_is_found(script: ModuleType, case: Any) -> None:
    expected = script.state_of(case.run)
    other_tensors = (expected[0], {"weight": torch.zeros(2)})
    assert "1 tensors" in script.judge(case, {}, other_tensors).fault
    assert "ranks failed" in script.judge(case, {1: 2}, expected).fault
    write_steps(case, range(1, script.STEPS + 1), loss=1.0000001)
    assert "losses" in script.judge(case, {}, expected).fault
    write_steps(case, [1, *range(1, script.STEPS + 1)])
    assert "missing or doubled" in script.judge(case, {}, expected).fault
    (case.notes / "kill-0").unlink()
    assert "not all kills" in script.judge(case, {}, expected).fault
