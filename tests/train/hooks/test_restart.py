"""Where a restart in place spends its time."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanotrain.comm.generation_store import Fault, Restart
from nanotrain.runs.failures import HangRecord, RankFailure, read_hang, write_failure
from nanotrain.runs.lock import LOCK_NAME
from nanotrain.runs.verdict import judge_run
from nanotrain.train.hooks.restart import FILE, RestartHook, seconds_of_restart


def test_a_restart_is_recorded_and_what_it_cured_is_not_judged_again(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).touch()
    write_failure(tmp_path, RankFailure(1, "a", 11.0, "ValueError", "with it rank 1 left"))
    HangRecord(10.0, "rank 1 is stopped", ()).write(tmp_path)
    restart = Restart(Fault(1, "is stopped", 10.0, step=6), noticed_s=10.5, met_s=12.0)
    generation = SimpleNamespace(
        number=1,
        max_restarts=3,
        restart=restart,
        connected_s=12.5,
        members=(0, 2),
        num_left=1,
    )
    control = SimpleNamespace(is_first=True)
    run: Any = SimpleNamespace(
        context=SimpleNamespace(generation=generation, control=control),
        folder=SimpleNamespace(path=tmp_path),
    )
    hook = RestartHook()
    hook.before_training(run)
    hook.begin_writing(run, step=4)
    row = json.loads((tmp_path / FILE).read_text())
    assert (row["step"], row["fault_step"], row["fault"]) == (4, 6, "is stopped")
    assert (row["ranks"], row["rank"]) == (2, 1)
    assert read_hang(tmp_path) is None
    verdict = judge_run(tmp_path, exit_codes={0: 2, 2: -9})
    assert (verdict.action, verdict.rule) == ("restart", "ended_by_signal")


def test_the_parts_of_a_restart_add_up() -> None:
    restart = Restart(Fault(1, "SIGKILL ended it", 10.0), noticed_s=10.5, met_s=12.0)
    seconds = seconds_of_restart(restart, connected_s=12.25, built_s=13.0, stepped_s=15.0)
    assert seconds == {
        "notice": 0.5,
        "agree": 1.5,
        "groups": 0.25,
        "load": 0.75,
        "first step": 2.0,
    }


def test_a_clock_that_is_behind_takes_no_time() -> None:
    restart = Restart(Fault(1, "SIGKILL ended it", 10.0), noticed_s=9.0, met_s=12.0)
    seconds = seconds_of_restart(restart, connected_s=11.0, built_s=13.0, stepped_s=14.0)
    assert seconds["notice"] == seconds["groups"] == 0.0
    assert sum(seconds.values()) == 4.0
