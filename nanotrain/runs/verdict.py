"""What to do after a failure, by rules: restart, exclude hosts and restart, or stop.

    Evidence      exit codes, errors of ranks, hang report, last step, earlier verdicts
    judge         the verdict of the first rule of `RULES` that applies
    judge_run     read the evidence of a run folder, judge it, append the verdict to verdicts.jsonl

A restart is judged once more: without a new step since two restarts the cause is in settings, code
or data, and a host that is named twice in a row is excluded. A new cause is a function and a row.
"""

import json
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from nanotrain.errors import INTERRUPTED
from nanotrain.runs.failures import (
    HangRecord,
    RankFailure,
    hosts_of,
    is_run_folder,
    read_failures,
    read_hang,
)
from nanotrain.runs.files import disk_errors, open_append, write_all
from nanotrain.runs.metrics_file import last_step
from nanotrain.untrusted import finite_number, plain_text, read_rows

Action = Literal["done", "restart", "exclude", "stop"]
FILE = "verdicts.jsonl"
MAX_IDLE_RESTARTS = 2  # restarts in a row without a new step, before the run is stopped
# kinds of errors that a start with the same settings, corpus and checkpoint raises again
SETTINGS = (
    "ConfigError",
    "ConfigErrors",
    "TopologyError",
    "ScheduleError",
    "DataError",
    "CheckpointError",
    "HuggingFaceError",
)
# texts of devices that do not recover by a restart of the process
BROKEN_DEVICE = (
    "uncorrectable ecc",
    "nvlink",
    "gpu is lost",
    "fallen off the bus",
    "hardware stack error",
    "no cuda-capable device",
    "unknown error",
)
DEVICE_ASSERT = ("device-side assert",)  # an index out of bounds: code or data
DEVICE_FAULT = ("cuda error", "cuda runtime error", "illegal memory access", "cublas", "hip error")
NETWORK_FAULT = ("nccl", "gloo", "connection reset", "connection closed", "timed out", "timeout")
FULL_DISK = ("no space left", "quota exceeded", "read-only", "symbolic link", "file too large")
PREFLIGHT = "the preflight found"  # a part of the error of `watch/sniff.py`
NAMED_HOST = re.compile(r"\bhost ([A-Za-z0-9][\w.-]*)")
# signals that a scheduler or a person sends to end a job
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Verdict:
    """What to do, and why."""

    action: Action
    rule: str
    reason: str  # one line
    hosts: tuple[str, ...] = ()  # to exclude, or suspected by a restart
    evidence: tuple[str, ...] = ()
    step: int = 0  # newest step of the run
    time_s: float = 0.0  # seconds since the epoch

    @property
    def line(self) -> str:
        """The verdict as one line; its first word is the action, hosts are separated by commas."""
        action: str = self.action
        if self.action == "exclude":
            action = f"exclude {','.join(self.hosts)}"
        return f"{action}: {self.reason}"


@dataclass(frozen=True)
class Evidence:
    """The facts about a failed attempt, by which it is judged."""

    exit_codes: Mapping[int, int] = field(default_factory=dict)  # by rank; negative: a signal
    job_exit_code: int | None = None  # of the launcher; None if unknown
    host: str = ""  # where the ranks of `exit_codes` ran
    failures: Sequence[RankFailure] = ()  # the earliest first
    hang: HangRecord | None = None
    has_folder: bool = True  # whether the run folder is there
    step: int = 0  # newest step of the run
    earlier: Sequence[Verdict] = ()

    @property
    def has_ended_well(self) -> bool:
        """Whether nothing failed."""
        codes = [*self.exit_codes.values()]
        if self.job_exit_code is not None:
            codes.append(self.job_exit_code)
        return bool(codes) and not any(codes) and not self.failures and self.hang is None

    @property
    def signals(self) -> dict[int, int]:
        """Signals that ended ranks, by rank; of a job as of rank -1."""
        signals = {rank: -code for rank, code in self.exit_codes.items() if code < 0}
        code = self.job_exit_code or 0
        if not signals and code > 128:
            signals[-1] = code - 128
        return signals

    def first(self, *kinds: str) -> RankFailure | None:
        """The earliest error of some kinds."""
        return next((failure for failure in self.failures if failure.kind in kinds), None)

    def unforeseen(self) -> list[RankFailure]:
        """Errors that are no messages to the user."""
        return [failure for failure in self.failures if not failure.is_foreseen]

    def with_texts(self, texts: Sequence[str]) -> list[RankFailure]:
        """Unforeseen errors that contain one of some texts."""
        found = []
        for failure in self.unforeseen():
            text = f"{failure.kind} {failure.what}".lower()
            if any(part in text for part in texts):
                found.append(failure)
        return found

    def lines(self) -> tuple[str, ...]:
        """The evidence, one fact per line."""
        lines = [f"newest step {self.step}"]
        if self.job_exit_code is not None:
            lines.append(f"the job ended with code {self.job_exit_code}")
        for rank, code in sorted(self.exit_codes.items()):
            ended = f"by {_signal_name(-code)}" if code < 0 else f"with code {code}"
            lines.append(f"rank {rank} on {self.host} ended {ended}")
        for failure in self.failures:
            lines.append(f"rank {failure.rank} on {failure.host}: {failure.text}")
        if self.hang is not None:
            lines.append(f"hang report: {self.hang.headline}")
        return tuple(lines)


Rule = Callable[[Evidence], Verdict | None]


def settings_or_data(evidence: Evidence) -> Verdict | None:
    """An error in settings, corpus or checkpoint: the next start raises it again."""
    failure = evidence.first(*SETTINGS)
    if failure is None:
        return None
    return Verdict("stop", "settings_or_data", f"the same start fails again: {failure.text}")


def corrupt_state(evidence: Evidence) -> Verdict | None:
    """Replicas that differ; the host is excluded where the error names it."""
    failure = evidence.first("CorruptState")
    if failure is None:
        return None
    hosts = tuple(dict.fromkeys(NAMED_HOST.findall(f"{failure.what} {failure.why} {failure.fix}")))
    if hosts:
        return Verdict("exclude", "corrupt_state", failure.text, hosts)
    reason = f"from the newest checkpoint, no host is known to be at fault: {failure.text}"
    return Verdict("restart", "corrupt_state", reason)


def training_fault(evidence: Evidence) -> Verdict | None:
    """Losses or gradients that are not finite, or spikes: a restart takes the same steps."""
    failure = evidence.first("TrainingFault")
    if failure is None:
        return None
    return Verdict("stop", "training_fault", f"the same steps follow: {failure.text}")


def storage_fault(evidence: Evidence) -> Verdict | None:
    """A full, missing or read-only disk stays so; a store that does not answer may come back."""
    failure = evidence.first("StorageFault", "FolderVanished", "MissingObject")
    if failure is None:
        return None
    text = f"{failure.what} {failure.why}".lower()
    if failure.kind != "StorageFault" or any(part in text for part in FULL_DISK):
        return Verdict("stop", "storage_fault", f"{failure.text}; {failure.fix}")
    return Verdict("restart", "storage_fault", failure.text)


def out_of_memory(evidence: Evidence) -> Verdict | None:
    """Memory ran out: at once by the settings, after new steps once more."""
    local = [item for item in evidence.failures if item.kind == "LocalFault"]
    failures = [item for item in local if "ran out of memory" in item.what]
    if not failures:
        return None
    text = failures[0].text
    if evidence.step <= _step_before(evidence):
        return Verdict("stop", "out_of_memory", f"before a new step, so by its settings: {text}")
    return Verdict("restart", "out_of_memory", text, hosts_of(failures))


def broken_device(evidence: Evidence) -> Verdict | None:
    """Errors of a device that a new process does not cure."""
    failures = evidence.with_texts(BROKEN_DEVICE)
    if not failures:
        return None
    return Verdict("exclude", "broken_device", failures[0].text, hosts_of(failures))


def device_fault(evidence: Evidence) -> Verdict | None:
    """Errors of kernels: by an index out of bounds, else perhaps by the device."""
    asserts = evidence.with_texts(DEVICE_ASSERT)
    if asserts:
        return Verdict("stop", "device_fault", f"an index out of bounds: {asserts[0].text}")
    failures = evidence.with_texts(DEVICE_FAULT)
    if not failures:
        return None
    return Verdict("restart", "device_fault", failures[0].text, hosts_of(failures[:1]))


def network_fault(evidence: Evidence) -> Verdict | None:
    """Collectives that timed out or lost a connection, without a report that names a rank."""
    failures = evidence.with_texts(NETWORK_FAULT)
    if not failures or evidence.hang is not None:
        return None
    return Verdict("restart", "network_fault", failures[0].text)


def code_error(evidence: Evidence) -> Verdict | None:
    """Any other exception of Python: the next start runs the same code."""
    if evidence.hang is not None or not evidence.unforeseen():
        return None
    failure = evidence.unforeseen()[0]
    return Verdict("stop", "code_error", f"rank {failure.rank}: {failure.text}")


def lost_machine(evidence: Evidence) -> Verdict | None:
    """A machine that did not reply when the hang report was written."""
    if evidence.hang is None:
        return None
    hosts = tuple(
        dict.fromkeys(rank.host for rank in evidence.hang.ranks if rank.state == "no reply")
    )
    if not hosts:
        return None
    return Verdict("exclude", "lost_machine", evidence.hang.headline, hosts)


def hang(evidence: Evidence) -> Verdict | None:
    """A rank that was killed, is stopped, lost its connections, or is behind."""
    if evidence.hang is None:
        return None
    hosts = tuple(dict.fromkeys(rank.host for rank in evidence.hang.ranks))
    return Verdict("restart", "hang", evidence.hang.headline, hosts)


def machine_fault(evidence: Evidence) -> Verdict | None:
    """A machine that is not as the run needs it, found by one rank or by all."""
    failure = evidence.first("LocalFault", "EnvironmentFault")
    if failure is None:
        return None
    if failure.kind == "LocalFault":
        return Verdict("restart", "machine_fault", failure.text, hosts_of([failure]))
    hosts = tuple(dict.fromkeys(NAMED_HOST.findall(failure.why)))
    if PREFLIGHT in failure.what and hosts:
        return Verdict("exclude", "machine_fault", failure.text, hosts)
    if "did not meet" in failure.what or "joined" in failure.what:
        return Verdict("restart", "machine_fault", failure.text)
    return Verdict("stop", "machine_fault", f"{failure.text}; {failure.fix}")


def lost_collective(evidence: Evidence) -> Verdict | None:
    """A failed collective without a hang report."""
    failure = evidence.first("CommunicationFault", "ReportedFault")
    if failure is None and not evidence.signals:  # else the rank that a signal ended is the cause
        failure = evidence.first("ErrorOfAnother")
    if failure is None:
        return None
    return Verdict("restart", "lost_collective", failure.text)


def ended_by_signal(evidence: Evidence) -> Verdict | None:
    """Ranks that a signal ended, without a word of their own."""
    signals = evidence.signals
    if not signals:
        return None
    numbers = set(signals.values())
    names = ", ".join(sorted(map(_signal_name, numbers)))
    if numbers <= set(ENDING) or evidence.job_exit_code == INTERRUPTED:
        return Verdict("restart", "preempted", f"{names} ended the job")
    hosts = (evidence.host,) if evidence.host else ()
    if signal.SIGBUS in numbers:
        return Verdict("stop", "ended_by_signal", f"{names}: a full /dev/shm is the usual cause")
    return Verdict("restart", "ended_by_signal", f"{names} ended a rank", hosts)


def no_evidence(evidence: Evidence) -> Verdict | None:
    """A user error that no rank noted, as one before there was a run folder; else unknown."""
    if evidence.job_exit_code == 2 or 2 in evidence.exit_codes.values():
        reason = "the message of the job says why: it ended with code 2 and noted no failure"
        return Verdict("stop", "no_evidence", reason)
    if not evidence.has_folder:
        reason = "the message of the job says why: it ended before it had a run folder"
        return Verdict("stop", "no_evidence", reason)
    return Verdict("restart", "no_evidence", "nothing tells why the job ended")


# in order: what needs a person first, then what names a host, then what a restart may cure
RULES: tuple[Rule, ...] = (
    settings_or_data,
    corrupt_state,
    training_fault,
    storage_fault,
    out_of_memory,
    broken_device,
    device_fault,
    network_fault,
    code_error,
    lost_machine,
    hang,
    machine_fault,
    lost_collective,
    ended_by_signal,
    no_evidence,
)


def judge(evidence: Evidence, *, now_s: float | None = None) -> Verdict:
    """The verdict on an attempt.

    Args:
        evidence: what is known of it.
        now_s: time of the verdict, in seconds since the epoch; None: now.
    """
    verdict = Verdict("done", "done", "the job ended without an error")
    if not evidence.has_ended_well:
        verdict = next(found for rule in RULES if (found := rule(evidence)) is not None)
    if verdict.action == "restart" and verdict.rule != "preempted":
        verdict = _judged_again(verdict, evidence)
    now = time.time() if now_s is None else now_s
    return replace(verdict, evidence=evidence.lines(), step=evidence.step, time_s=now)


def _judged_again(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Exclude a host that is suspected twice in a row; stop a run that makes no step."""
    earlier = [item for item in evidence.earlier if item.rule != "preempted"]
    if earlier and earlier[-1].action == "restart":
        again = tuple(host for host in verdict.hosts if host in earlier[-1].hosts)
        if again:
            reason = f"the second failure in a row with this host: {verdict.reason}"
            return Verdict("exclude", f"{verdict.rule}, again", reason, again)
    idle = 0
    for item in reversed(earlier):
        if item.action not in ("restart", "exclude") or item.step < evidence.step:
            break
        idle += 1
    if idle < MAX_IDLE_RESTARTS:
        return verdict
    reason = f"{idle + 1} failures without a step after step {evidence.step}: {verdict.reason}"
    return Verdict("stop", f"{verdict.rule}, no progress", reason)


def _step_before(evidence: Evidence) -> int:
    """The newest step at the last failure; 0 without one."""
    return evidence.earlier[-1].step if evidence.earlier else 0


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def judge_run(
    folder: Path,
    *,
    since_s: float = 0.0,
    exit_codes: Mapping[int, int] | None = None,
    job_exit_code: int | None = None,
    host: str = "",
) -> Verdict:
    """Judge the newest attempt of a run, and append the verdict to its folder.

    Args:
        folder: run folder; without one there is only the exit code.
        since_s: when the attempt began; 0: after the last verdict.
        exit_codes: exit codes of ranks; negative ones are signals.
        job_exit_code: exit code of the launcher.
        host: host of these ranks.

    Raises:
        EnvironmentFault: the folder cannot be written.
    """
    earlier = read_verdicts(folder)
    if not since_s and earlier:
        since_s = earlier[-1].time_s
    else:  # launchers of other machines may have judged this attempt
        earlier = [item for item in earlier if item.time_s < since_s or not since_s]
    evidence = Evidence(
        exit_codes=exit_codes or {},
        job_exit_code=job_exit_code,
        host=host,
        failures=read_failures(folder, since_s=since_s),
        hang=read_hang(folder, since_s=since_s),
        has_folder=folder.is_dir(),
        step=last_step(folder / "metrics.jsonl"),
        earlier=earlier,
    )
    verdict = judge(evidence)
    if is_run_folder(folder) and verdict.action != "done":
        path = folder / FILE
        with open_append(path) as file, disk_errors(path):
            write_all(file, json.dumps(asdict(verdict)).encode() + b"\n")
    return verdict


def read_verdicts(folder: Path) -> list[Verdict]:
    """The verdicts of a run, the oldest first; damaged rows are left out."""
    verdicts = []
    for row in read_rows(folder / FILE):
        with suppress(KeyError, TypeError, ValueError):
            verdicts.append(_verdict_of(row))
    return verdicts


def _verdict_of(row: dict[str, Any]) -> Verdict:
    """The verdict of a row of verdicts.jsonl; ValueError or LookupError for a damaged row."""
    if row["action"] not in ("restart", "exclude", "stop"):
        raise ValueError("unknown action")
    return Verdict(
        cast(Action, row["action"]),
        plain_text(row["rule"]),
        plain_text(row["reason"]),
        tuple(plain_text(host) for host in row["hosts"]),
        tuple(plain_text(line) for line in row["evidence"]),
        step=int(row["step"]),
        time_s=finite_number(row["time_s"], "time_s"),
    )
