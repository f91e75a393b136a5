"""The drill of a rank that is stopped, and the rules of the watchdog.

A rank that is killed: tests/train/test_restart.py.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from nanotrain.comm.generations import Generation
from nanotrain.comm.heartbeat import RECORD_BYTES
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.runs.failures import HangRank, read_hang
from nanotrain.runs.verdict import judge_run
from nanotrain.topology.topology import Topology
from nanotrain.watch.processes import RankProcess, start_time, state_of
from nanotrain.watch.report import Diagnosis
from nanotrain.watch.watchdog import ALARM, REPORT, Watchdog, timeout_of
from tests.harness import HANG_S, parallel_config
from tests.laws.command_line import ForkedRanks, arguments

IMPATIENT = """
import sys
from nanotrain.train.main import main
from nanotrain.watch import watchdog
watchdog.GRACE_S = 0.5
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_with_a_stopped_rank_ends_and_names_it(tmp_path: Path) -> None:
    line = arguments(
        tmp_path / "run", "--train-iters 100000 --micro-batch-size 2 --num-workers 0 --no-save"
    )
    program = tmp_path / "impatient.py"
    program.write_text(IMPATIENT)
    forked = ForkedRanks([*line, "--hang-timeout-s", "5"], folder=tmp_path, program=program)
    await_steps(tmp_path / "run", is_running=lambda: forked.is_running)
    rank = forked.processes[1].pid
    os.kill(rank, signal.SIGSTOP)
    forked.processes[0].join(HANG_S)  # it kills rank 1 and ends; `wait` could kill it in between
    finished = forked.wait()
    assert forked.processes[0].exitcode == 2, finished.output
    assert re.search(
        rf"error: .*rank 1 \(dp1, host \S+, pid {rank}\) is stopped", finished.output, re.S
    ), finished.output
    report = (tmp_path / "run" / REPORT).read_text()
    assert f"rank 1 (dp1, host {os.uname().nodename}, pid {rank}) is stopped" in report
    assert re.search(r"^0 +dp0 .* sleeping|^0 +dp0 .* running", report, re.M), report
    record = read_hang(tmp_path / "run")
    assert record.ranks == (HangRank(1, os.uname().nodename, "stopped"),)
    verdict = judge_run(tmp_path / "run", job_exit_code=2)
    assert (verdict.action, verdict.rule) == ("restart", "hang")
    assert f"pid {rank}) is stopped" in verdict.reason and verdict.step >= 2
    (folder,) = (tmp_path / "run").glob("hang-2*")
    assert [path.name for path in folder.glob("rank-*.txt")] == ["rank-00000.txt"]
    # of gloo's collectives, by torch
    recorded = json.loads((folder / "collectives-00000.json").read_text())
    assert {"world", "control"} <= {each["group"] for each in recorded}
    assert all(each["input_sizes"] for each in recorded)
    assert "nanotrain/comm/work.py" in (folder / "rank-00000.txt").read_text()
    assert finished.output.count("error: ") == 1, finished.output
    assert not is_there(rank)


def await_steps(run_dir: Path, *, is_running: Callable[[], bool]) -> None:
    """Wait until a run has made two steps."""
    end, metrics = time.monotonic() + HANG_S, run_dir / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert is_running() and time.monotonic() < end, "the run did not start"
        time.sleep(0.05)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_rank_that_begins_nothing_ends_with_its_stacks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    context, ended = ParallelContext.attach(Topology.of(parallel_config(), 1)), []
    watchdog = Watchdog(context, tmp_path, timeout_s=0.3, end=ended.append)
    context.heartbeat.begin("data", step=5)
    context.heartbeat.begin("step")
    watchdog.start()
    end = time.monotonic() + HANG_S
    while not ended and time.monotonic() < end:
        time.sleep(0.05)
    watchdog.stop(phase="failed")
    assert ended == [2]
    report = (tmp_path / REPORT).read_text()
    assert (
        "rank 0 began nothing for" in report
        and "no rank waits for another one; look at the stacks" in report
    )
    assert "in step 5, phase step" in capfd.readouterr().err
    (folder,) = tmp_path.glob("hang-2*")
    assert "test_one_rank_that_begins_nothing" in (folder / "rank-00000.txt").read_text()


def test_a_rank_that_moves_slowly_and_a_checkpoint_that_takes_long_are_no_reason(
    tmp_path: Path,
) -> None:
    context = ParallelContext.attach(Topology.of(parallel_config(), 1))
    watchdog = Watchdog(context, tmp_path, timeout_s=10.0)
    for now in (0.0, 9.0, 18.0, 27.0):
        context.heartbeat.begin("step")
        assert not watchdog.reason_to_end(now), now
    assert not watchdog.reason_to_end(36.9)
    assert watchdog.reason_to_end(37.0) == "rank 0 began nothing for 10 s (--hang-timeout-s 10)"
    context.heartbeat.begin("checkpoint")
    assert not any(watchdog.reason_to_end(now) for now in (40.0, 400.0))


@pytest.mark.parametrize(
    ("is_supervised", "is_frozen", "ends_process"),
    [(True, True, False), (False, True, True), (False, False, False)],
)
def test_where_ranks_go_on_in_place_a_process_ends_if_nobody_starts_the_lost_one_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_supervised: bool,
    is_frozen: bool,
    ends_process: bool,
) -> None:
    context, ended = ParallelContext.attach(Topology.of(parallel_config(), 1)), list[object]()
    generation = SimpleNamespace(
        has_ended=False,
        is_supervised=is_supervised,
        end=lambda what, *, rank: ended.append((what, rank)),
    )
    context.generation = cast(Generation, generation)
    watchdog = Watchdog(context, tmp_path, timeout_s=0.1, end=ended.append)
    found = Diagnosis((3,), "rank 3 is stopped\nrank 4 too")
    monkeypatch.setattr(watchdog, "_report", lambda reason: found)
    context.heartbeat.begin("step")
    with contextmanager(stopped_child)() as process:
        if is_frozen:
            watchdog._local.append(process)
            watchdog._records[1] = memoryview(bytearray(RECORD_BYTES)).cast("q")
        watchdog._watch()
    assert ended == [2 if ends_process else ("rank 3 is stopped; rank 4 too", 3)]


def stopped_child() -> Iterator[RankProcess]:
    child = subprocess.Popen(["sleep", "600"])
    try:
        process = RankProcess(1, "host", child.pid, start_time(child.pid), "this machine")
        child.send_signal(signal.SIGSTOP)
        while state_of(process) != "T":
            time.sleep(0.01)
        yield process
    finally:
        child.kill()
        child.wait()


def test_a_rank_that_is_stopped_inside_a_save_is_a_reason(tmp_path: Path) -> None:
    context = ParallelContext.attach(Topology.of(parallel_config(), 1))
    watchdog = Watchdog(context, tmp_path, timeout_s=10.0)
    context.heartbeat.begin("checkpoint")
    assert not any(watchdog.reason_to_end(now) for now in (0.0, 400.0))
    with contextmanager(stopped_child)() as process:
        watchdog._local.append(process)
        watchdog._records[1] = memoryview(bytearray(RECORD_BYTES)).cast("q")
        assert not watchdog.reason_to_end(409.0)
        assert (
            watchdog.reason_to_end(410.0) == "rank 0 began nothing for 10 s (--hang-timeout-s 10)"
        )


def test_a_rank_whose_connections_were_cut_is_named_by_the_ports_in_the_errors_of_the_others(
    tmp_path: Path,
) -> None:
    watchdog = Watchdog(
        ParallelContext.attach(Topology.of(parallel_config(), 1)), tmp_path, timeout_s=10.0
    )
    watchdog._hang_folder.mkdir()
    closed = "all_reduce #3 failed: gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:12673. GLHF!"
    written = [
        ([36531], closed),
        ([33073, 33906], ALARM),
        ([36457], closed),
        ([1], "[10.0.0.2]:12673 timed out"),
    ]
    for rank, (ports, reason) in enumerate(written):
        text = json.dumps({"ports": ports, "reason": reason})
        (watchdog._hang_folder / f"connections-{rank:05d}.json").write_text(text)
    assert watchdog._lost_connections() == {0: 1, 2: 1}


def test_only_the_rank_that_writes_the_report_reads_the_files_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog = Watchdog(
        ParallelContext.attach(Topology.of(parallel_config(), 1)), tmp_path, timeout_s=10.0
    )
    watchdog._hang_folder.mkdir()
    (watchdog._hang_folder / "writer").touch()
    found = {"ranks": [1], "headline": "rank 1 was killed"}
    (watchdog._hang_folder / "written").write_text(json.dumps(found))
    monkeypatch.setattr(Path, "glob", None)
    assert watchdog._report("rank 0 began nothing") == Diagnosis((1,), "rank 1 was killed")


def test_the_message_begins_with_the_cause_where_another_rank_gave_the_alarm(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    context = ParallelContext.attach(Topology.of(parallel_config(), 1))
    watchdog = Watchdog(context, tmp_path, timeout_s=100.0)
    lost = Diagnosis((), "rank 3 was killed")
    for reason, message in (
        ("rank 0 began nothing", "error: rank 0 began nothing\nrank 3"),
        (ALARM, "error: rank 3"),
    ):
        watchdog._hang_folder.mkdir(exist_ok=True)
        watchdog._write_report(reason, lost, views={})
        assert capfd.readouterr().err.startswith(f"{message} was killed\nsee "), reason
        assert f"reason: {reason}\n" in (tmp_path / REPORT).read_text()


def test_the_timeout_lies_below_that_of_collectives_unless_it_is_set() -> None:
    assert timeout_of(None, 600.0) == 540.0
    assert timeout_of(0.0, 600.0) == 0.0 and timeout_of(30.0, 600.0) == 30.0


def test_a_finished_run_leaves_no_report(tmp_path: Path) -> None:
    context = ParallelContext.attach(Topology.of(parallel_config(), 1))
    watchdog = Watchdog(context, tmp_path, timeout_s=100.0)
    watchdog.start()
    watchdog.stop(phase="finished")
    assert not list(tmp_path.iterdir())
