"""Verdicts on failures of every kind, as ranks, launchers and hang reports record them."""

import json
from dataclasses import replace

import pytest

from nanotrain.comm.generations import ErrorOfAnother
from nanotrain.errors import (
    CheckpointError,
    ConfigError,
    ConfigErrors,
    CorruptState,
    DataError,
    EnvironmentFault,
    LocalFault,
    ReportedFault,
    StorageFault,
    TrainingFault,
)
from nanotrain.runs.failures import HangRank, HangRecord, RankFailure, write_failure
from nanotrain.runs.files import FolderVanished
from nanotrain.runs.verdict import FILE, RULES, Evidence, Verdict, judge, judge_run, read_verdicts
from nanotrain.train.hooks.replay import Finding, describe


def error_of(error: Exception, *, rank: int = 0, host: str = "node7") -> RankFailure:
    return replace(RankFailure.of(error, rank=rank), host=host)


def failed(error: Exception, **values) -> Evidence:
    return Evidence(exit_codes={0: 2, 1: 2}, host="node7", failures=[error_of(error)], **values)


def hung(state: str, *, hosts=("node7",), headline: str = "rank 1 is behind") -> Evidence:
    ranks = tuple(HangRank(number, host, state) for number, host in enumerate(hosts, start=1))
    return Evidence(job_exit_code=2, hang=HangRecord(1.0, headline, ranks))


def ended(*codes: int, job: int | None = None) -> Evidence:
    return Evidence(exit_codes=dict(enumerate(codes)), host="node7", job_exit_code=job)


def as_raised(kind: str, text: str) -> Exception:
    """An error of torch's classes, which is a RuntimeError of another name."""
    return type(kind, (RuntimeError,), {})(text)


KILLED = (
    "rank 1 (dp1, host node7, pid 7) ended without an error message: it was killed, or its machine "
    "ran out of memory; it was in step 2, phase forward-backward"
)
LAST_STEP = Verdict("restart", "hang", "rank 3 is behind", ("node3",), step=40)
OUT_OF_MEMORY = LocalFault("rank 1 (dp1) ran out of memory", why="tried to allocate 3 GiB")
DIFFERS = Finding((1,), (0, 2), ("layers.2.mlp.up.weight (bucket 3)",), 40)
REPLAY = describe([DIFFERS], ("node7", "node9", "node8"), step=12)
# what happened, the action, the rule, the hosts
CASES = {
    "settings": (failed(ConfigError("tp=3")), "stop", "settings_or_data", ()),
    "several settings": (
        failed(ConfigErrors([ConfigError("a"), ConfigError("b")])),
        *("stop", "settings_or_data", ()),
    ),
    "corpus": (failed(DataError("the index is damaged")), "stop", "settings_or_data", ()),
    "checkpoint": (failed(CheckpointError("of another model")), "stop", "settings_or_data", ()),
    "replicas differ": (failed(CorruptState("w differs")), "restart", "corrupt_state", ()),
    "replay names a host": (failed(REPLAY), "exclude", "corrupt_state", ("node9",)),
    "NaN losses": (failed(TrainingFault("3 steps in a row")), "stop", "training_fault", ()),
    "full disk": (
        failed(StorageFault("x cannot be written", why="No space left on device: 5 bytes needed")),
        *("stop", "storage_fault", ()),
    ),
    "folder gone": (failed(FolderVanished("runs/a is gone")), "stop", "storage_fault", ()),
    "store is silent": (
        failed(StorageFault("s3://b/run does not answer", why="for 300 s")),
        *("restart", "storage_fault", ()),
    ),
    "memory at once": (failed(OUT_OF_MEMORY), "stop", "out_of_memory", ()),
    "memory after steps": (
        failed(OUT_OF_MEMORY, step=50, earlier=[LAST_STEP]),
        *("restart", "out_of_memory", ("node7",)),
    ),
    "ECC": (
        failed(as_raised("AcceleratorError", "CUDA error: uncorrectable ECC error encountered")),
        *("exclude", "broken_device", ("node7",)),
    ),
    "no device": (
        failed(RuntimeError("No CUDA-capable device is detected")),
        *("exclude", "broken_device", ("node7",)),
    ),
    "device assert": (
        failed(as_raised("AcceleratorError", "CUDA error: device-side assert triggered")),
        *("stop", "device_fault", ()),
    ),
    "illegal access": (
        failed(as_raised("AcceleratorError", "CUDA error: an illegal memory access")),
        *("restart", "device_fault", ("node7",)),
    ),
    "NCCL timeout": (
        failed(as_raised("DistBackendError", "NCCL watchdog: collective operation timeout")),
        *("restart", "network_fault", ()),
    ),
    "gloo": (
        failed(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")),
        *("restart", "network_fault", ()),
    ),
    "code": (failed(KeyError("layers")), "stop", "code_error", ()),
    "machine gone": (
        hung("no reply", hosts=("node8", "node8")),
        *("exclude", "lost_machine", ("node8",)),
    ),
    "rank killed": (hung("lost"), "restart", "hang", ("node7",)),
    # as recorded: a headline that speaks of memory is no such error
    "rank killed, as noted": (
        replace(
            hung("lost", headline=KILLED),
            exit_codes={0: 2, 1: -9},
            failures=[error_of(ReportedFault(KILLED))],
        ),
        *("restart", "hang", ("node7",)),
    ),
    "rank stopped": (hung("stopped"), "restart", "hang", ("node7",)),
    "rank behind": (hung("running"), "restart", "hang", ("node7",)),
    "nobody waits": (hung("running", hosts=()), "restart", "hang", ()),
    "no meeting": (
        failed(EnvironmentFault("the machines of this job did not meet")),
        *("restart", "machine_fault", ()),
    ),
    "one machine": (
        failed(LocalFault("/dev/shm is small")),
        *("restart", "machine_fault", ("node7",)),
    ),
    "preflight": (
        failed(
            EnvironmentFault(
                "the preflight found 1 outlier", why="rank 5 on host node9: product takes 9.0 ms"
            )
        ),
        *("exclude", "machine_fault", ("node9",)),
    ),
    "no GPU": (
        failed(EnvironmentFault("no GPU is visible", fix="--device cpu")),
        *("stop", "machine_fault", ()),
    ),
    "collective": (failed(ReportedFault("rank 1 ended")), "restart", "lost_collective", ()),
    "error of another rank": (
        failed(ErrorOfAnother("the run ends")),
        *("restart", "lost_collective", ()),
    ),
    "SIGBUS after the last restart in place": (
        replace(ended(2, -7), failures=[error_of(ErrorOfAnother("the run ends"))]),
        *("stop", "ended_by_signal", ()),
    ),
    "SIGKILL": (ended(-9, 2), "restart", "ended_by_signal", ("node7",)),
    "SIGSEGV of a job": (ended(job=139), "restart", "ended_by_signal", ("node7",)),
    "SIGBUS": (ended(-7), "stop", "ended_by_signal", ()),
    "SIGBUS of a job": (ended(job=135), "stop", "ended_by_signal", ()),
    "preempted": (ended(-15, -15), "restart", "preempted", ()),
    "interrupted": (ended(job=130), "restart", "preempted", ()),
    "code 2 alone": (ended(job=2), "stop", "no_evidence", ()),
    "unknown": (ended(job=1), "restart", "no_evidence", ()),
    "ended well": (ended(0, 0, job=0), "done", "done", ()),
}


@pytest.mark.parametrize("name", CASES)
def test_a_failure_has_its_verdict(name):
    evidence, action, rule, hosts = CASES[name]
    verdict = judge(evidence, now_s=5.0)
    assert (verdict.action, verdict.rule, verdict.hosts) == (action, rule, hosts)
    assert verdict.line.startswith(action) and "\n" not in verdict.line and verdict.time_s == 5.0
    if action == "exclude":
        assert verdict.line.startswith(f"exclude {','.join(hosts)}: ")
    for failure in evidence.failures:
        assert any(failure.text in line for line in verdict.evidence)


def test_every_rule_decides_a_case():
    assert {rule for _, _, rule, _ in CASES.values()} >= {
        rule.__name__ for rule in RULES if rule.__name__ != "ended_by_signal"
    }


def test_a_host_that_is_suspected_twice_in_a_row_is_excluded():
    first = judge(hung("lost"))
    step = replace(hung("lost", hosts=("node3", "node7")), step=9, earlier=[first])
    again = judge(step)
    assert (again.action, again.hosts, again.rule) == ("exclude", ("node7",), "hang, again")
    other = judge(replace(step, hang=hung("lost", hosts=("node3",)).hang))
    assert other.action == "restart" and other.hosts == ("node3",)
    preempted = judge(ended(-15))
    assert judge(replace(step, earlier=[first, preempted])).action == "exclude"


def test_three_failures_without_a_step_stop_the_run():
    lost = [hung("lost", hosts=(f"node{number}",)) for number in range(3)]
    first = judge(replace(lost[0], step=8))
    second = judge(replace(lost[1], step=8, earlier=[first]))
    assert (first.action, second.action) == ("restart", "restart")
    third = judge(replace(lost[2], step=8, earlier=[first, second]))
    assert third.action == "stop"
    assert "3 failures without a step after step 8" in third.reason
    assert judge(replace(lost[2], step=9, earlier=[first, second])).action == "restart"


def test_the_first_error_counts_and_what_it_needs_decides():
    """Ranks that lose another one fail too, and later."""
    early = replace(error_of(KeyError("layers"), rank=3, host="node8"), time_s=1.0)
    later = replace(error_of(ReportedFault("rank 3 ended")), time_s=2.0)
    verdict = judge(Evidence(failures=[early, later]))
    assert verdict.action == "stop" and verdict.reason == "rank 3: KeyError: 'layers'"


def test_a_run_folder_is_judged_and_keeps_its_verdicts(tmp_path):
    (tmp_path / "run.lock").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    write_failure(tmp_path, error_of(LocalFault("rank 1 ran out of memory"), rank=1))
    HangRecord(0.0, "of an earlier attempt", ()).write(tmp_path)
    first = judge_run(tmp_path, since_s=1.0, exit_codes={1: 2}, host="node7")
    assert (first.action, first.rule, first.step) == ("restart", "out_of_memory", 7)
    assert read_verdicts(tmp_path) == [first]
    # the failure of the first attempt does not count again
    second = judge_run(tmp_path, job_exit_code=137)
    assert second.rule == "ended_by_signal" and len(read_verdicts(tmp_path)) == 2
    assert judge_run(tmp_path, job_exit_code=0).action == "done"
    with (tmp_path / FILE).open("a") as file:
        file.write('{"action": "erase", "rule": ""}\n{"action":\n')
    assert read_verdicts(tmp_path) == [first, second]
    assert json.loads((tmp_path / FILE).read_text().splitlines()[0])["hosts"] == ["node7"]


def test_without_a_run_folder_there_is_the_exit_code(tmp_path):
    for code in (1, 2):
        verdict = judge_run(tmp_path / "none", job_exit_code=code)
        assert verdict.action == "stop" and not (tmp_path / "none").exists()
    assert judge_run(tmp_path / "none", job_exit_code=137).action == "restart"
