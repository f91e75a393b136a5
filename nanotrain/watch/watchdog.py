"""`Watchdog`: a thread per rank that ends a run without progress, and reports which rank is behind.

    this rank began nothing for timeout_s  --+
    a rank of this machine ended           --+-->  alarm: its stacks to hang-TIME/rank-N.txt
    a rank of this machine gave an alarm   --+     records of this machine to hang-TIME/host-M.json
                                                   one rank, after GRACE_S: hang-report.txt
                                                   every rank:              exit code 2, or with
                                                   --inprocess-restart the next generation

A frozen rank cannot report, but its record is in shared memory, so other ranks report it. The ranks
of every machine write files into the run folder, from which the ranks of other machines read; no
network is used.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.flight_recorder import RecordedCollective, recorded_collectives
from nanotrain.comm.heartbeat import read_record
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.work import CommunicationFault
from nanotrain.errors import EXIT_CODE, EnvironmentFault, ReportedFault
from nanotrain.quantities import count_of
from nanotrain.runs.failures import HangRank, HangRecord
from nanotrain.runs.files import write_text
from nanotrain.watch.processes import RankProcess, lost_port, share_heartbeats, state_of, tcp_ports
from nanotrain.watch.report import (
    STATES,
    Diagnosis,
    RankView,
    diagnose,
    report_text,
    unmatched_collectives,
)

REPORT = "hang-report.txt"
WRITTEN = "written"  # file with ranks and headline of the diagnosis, once the report is complete
ENDED_PHASES = ("finished", "failed")
MAX_POLL_S = 1.0
# between two looks for files of other ranks: thousands of ranks look
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 0.5
# a reason that leaves the cause to the diagnosis
ALARM = "another rank of this machine gave an alarm"
MAX_LINES = 4  # process groups whose collectives the message lists; the report lists all
# from the first alarm to the report, so that the other ranks can notice it and write their files
GRACE_S = 3.0
# from the end of a rank to the alarm; a failed collective usually ends this rank before
LOST_S = 2.0
UNTIMED_PHASES = ("start", "checkpoint")  # their duration depends on the disk
# share of the timeout of collectives, after which torch would end the run without a report
SHARE_OF_TIMEOUT = 0.9


class Watchdog:
    """Watches the ranks of this machine from a separate thread.

    Args:
        context: device and process groups of this rank.
        folder: run folder, for the report.
        timeout_s: seconds in which a rank begins something unless it hangs. 0 watches only for lost
            ranks; None is a share of the timeout of collectives, which may change during the run.
        end: function that ends this process; replaced in tests.
    """

    def __init__(
        self,
        context: ParallelContext,
        folder: Path,
        *,
        timeout_s: float | None,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._context = context
        self._topology = context.topology
        self._rank = context.rank
        self._heartbeat = context.heartbeat
        self._folder = folder
        self._hang_timeout_s = timeout_s
        self._end = end
        self._processes, self._records = share_heartbeats(context.heartbeat, context.control)
        # the ranks of this machine
        self._local = [process for process in self._processes if process.rank in self._records]
        now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        self._hang_folder = folder / f"hang-{all_gather_object(now, context.control)[0]}"
        self._stopped = threading.Event()
        self._reporting = threading.Lock()
        self._beats = -1  # beats of this rank when it last began something
        self._moved = time.monotonic()  # when that was
        self._ports = tcp_ports()
        self._lost_since: float | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, *, phase: str) -> None:
        """End the thread; `phase` is "finished" or "failed"."""
        self._heartbeat.begin(phase)
        self._stopped.set()
        self._thread.join()

    def explain(self, fault: CommunicationFault) -> EnvironmentFault:
        """Report a failed collective with the rank that was lost.

        Returns:
            The fault with that rank, or the fault itself if no report can be written.
        """
        self._stopped.set()
        _wait_until(
            self._lost_ranks, GRACE_S
        )  # a killed process ends a moment later than its sockets
        with self._reporting:
            diagnosis = self._report(f"{fault.what}: {fault.why}")
        return fault if diagnosis is None else ReportedFault(diagnosis.headline)

    @contextmanager
    def reporting_before_sigterm(self) -> Iterator[None]:
        """Ignore SIGTERM once a rank is lost, until the report is written.

        torchrun sends it immediately. Without effect outside the main thread, because other threads
        cannot handle signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

        def on_signal(number: int, _frame: FrameType | None) -> None:
            if not self._lost_ranks():
                signal.signal(number, before)
                signal.raise_signal(number)

        signal.signal(signal.SIGTERM, on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @property
    def _timeout_s(self) -> float:
        return timeout_of(self._hang_timeout_s, self._context.timeout_s)

    @property
    def _poll_s(self) -> float:
        """Seconds between two looks at the ranks."""
        return min(MAX_POLL_S, self._timeout_s / 10 or MAX_POLL_S)

    def _watch(self) -> None:
        """Poll for a reason to end the run, on a thread; then report it and end the process."""
        reason = ""
        while not reason:
            if self._stopped.wait(self._poll_s):
                return
            reason = self.reason_to_end(time.monotonic())
        # The lock is held until the process ends: killing a frozen rank fails the collective that
        # the main thread waits for, which would begin a second report and overwrite the stacks of
        # this one.
        with self._reporting:
            if self._stopped.is_set():  # the main thread reported meanwhile
                return
            diagnosis = self._report(reason) or Diagnosis((), reason)
            sys.stdout.flush()
            was_killed = self._kill_frozen()
            generation = self._context.generation
            is_gone = was_killed or bool(self._lost_ranks())
            # the agent of torchrun, which starts no single rank, waits for the end of the others
            if generation is None or (is_gone and not generation.is_supervised):
                self._end(EXIT_CODE)
            else:
                behind = diagnosis.ranks[0] if diagnosis.ranks else None
                generation.end("; ".join(diagnosis.headline.splitlines()), rank=behind)

    def reason_to_end(self, now: float) -> str:
        """Why the run has to end at `now`, in seconds of a monotonic clock; "" if it may go on."""
        if self._context.generation is not None and self._context.generation.has_ended:
            return ""
        if self._heartbeat.beats != self._beats or self._is_slow_by_nature():
            self._beats = self._heartbeat.beats
            self._moved = now
        lost = self._lost_ranks()
        if not lost:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        still_s = now - self._moved
        if self._timeout_s and still_s >= self._timeout_s:
            setting = f"--hang-timeout-s {self._timeout_s:g}"
            return f"rank {self._rank} began nothing for {still_s:.0f} s ({setting})"
        if self._lost_since is not None and now - self._lost_since >= LOST_S:
            return f"rank {lost[0].rank} ended"
        if any(read_record(record).is_alarmed for record in self._records.values()):
            return ALARM
        return ""

    def _is_slow_by_nature(self) -> bool:
        """Whether this rank may take long: it reads or writes the disk, and no rank is stopped."""
        if read_record(self._records[self._rank]).phase not in UNTIMED_PHASES:
            return False
        return all(state_of(process) != "T" for process in self._local)

    def _lost_ranks(self) -> list[RankProcess]:
        """The ranks of this machine whose process ended before the run did."""
        lost = []
        for process in self._local:
            phase = read_record(self._records[process.rank]).phase
            if not state_of(process) and phase not in ENDED_PHASES:
                lost.append(process)
        return lost

    def _report(self, reason: str) -> Diagnosis | None:
        """Write the files of this rank and, on one rank, the report; returns its diagnosis.

        None if the run folder cannot be written.
        """
        self._heartbeat.alarm()
        try:
            self._write_own_files(reason)
            if not self._is_writer():
                return self._await_diagnosis() or Diagnosis((), reason)
            _wait_until(self._all_have_written, GRACE_S)
            self._write_records()  # the states of frozen and lost processes as they are now
            views = self._views()
            diagnosis = diagnose(views, self._topology, cut=self._lost_connections())
            self._write_report(reason, diagnosis, views=views)
            return diagnosis
        except (OSError, EnvironmentFault) as error:
            text = f"error: {reason}; no report: {self._folder} cannot be written: {error}"
            print(text, file=sys.stderr, flush=True)
            return None

    def _write_own_files(self, reason: str) -> None:
        """Write the stacks, ports and collectives of this rank, and the records of its machine."""
        self._hang_folder.mkdir(exist_ok=True)
        with (self._hang_folder / f"rank-{self._rank:05d}.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        self._write_records()
        connections = {"ports": self._ports, "reason": reason}
        write_text(self._file("connections"), json.dumps(connections))
        collectives = [asdict(collective) for collective in recorded_collectives()]
        write_text(self._file("collectives"), json.dumps(collectives))

    def _await_diagnosis(self) -> Diagnosis | None:
        """The diagnosis of the report that another rank writes; None if it does not come.

        It is awaited because torchrun ends all ranks as soon as one has ended.
        """
        written = self._hang_folder / WRITTEN
        _wait_until(written.exists, GRACE_S / 3)
        self._write_records()
        _wait_until(written.exists, 2 * GRACE_S)
        if not written.exists():
            return None
        values = json.loads(written.read_text())
        return Diagnosis(tuple(values["ranks"]), values["headline"])

    def _write_records(self) -> None:
        """The records of all ranks of this machine; each of its ranks writes the same."""
        records = {}
        for process in self._local:
            record = self._records[process.rank].tolist()
            records[process.rank] = {"state": state_of(process), "record": record}
        write_text(self._hang_folder / f"host-of-rank-{min(records):05d}.json", json.dumps(records))

    def _file(self, name: str) -> Path:
        return self._hang_folder / f"{name}-{self._rank:05d}.json"

    def _read_files(self, name: str) -> dict[int, Any]:
        """The files `_file(name)` of all ranks that have written theirs, by rank."""
        values = {}
        for path in sorted(self._hang_folder.glob(f"{name}-*.json")):
            values[int(path.stem.removeprefix(f"{name}-"))] = json.loads(path.read_text())
        return values

    def _lost_connections(self) -> dict[int, int]:
        """The rank at the other end of a connection that a rank lost, by rank.

        Only where the error of the rank names the port.
        """
        files = self._read_files("connections")
        owners: dict[int, int] = {}  # rank of each port
        for rank, values in files.items():
            owners |= dict.fromkeys(values["ports"], rank)
        lost = {}
        for rank, values in files.items():
            port = lost_port(values["reason"])
            if port is not None and owners.get(port, rank) != rank:
                lost[rank] = owners[port]
        return lost

    def _recorded(self) -> dict[int, list[RecordedCollective]]:
        """The collectives in the flight recorders of all ranks that could write theirs."""
        recorded = {}
        for rank, entries in self._read_files("collectives").items():
            recorded[rank] = [_collective_from_json(entry) for entry in entries]
        return recorded

    def _all_have_written(self) -> bool:
        """Whether all ranks wrote stacks and collectives, and all machines their records."""
        num_ranks = len(self._processes)
        num_machines = len({process.machine for process in self._processes})
        return (
            self._count_files("rank-*.txt") == num_ranks
            and self._count_files("collectives-*.json") == num_ranks
            and self._count_files("host-of-rank-*.json") >= num_machines
        )

    def _count_files(self, pattern: str) -> int:
        return len(list(self._hang_folder.glob(pattern)))

    def _views(self) -> dict[int, RankView]:
        """State of each rank, from the records that the machines have written."""
        views = {}
        for process in self._processes:
            views[process.rank] = RankView(process.rank, process.host, process.pid, "?")
        for path in sorted(self._hang_folder.glob("host-of-rank-*.json")):
            for rank, entry in json.loads(path.read_text()).items():
                beat = read_record(memoryview(array("q", entry["record"])))
                views[int(rank)] = replace(views[int(rank)], state=entry["state"], beat=beat)
        return views

    def _is_writer(self) -> bool:
        """Whether this rank writes the report: the first rank that calls this does."""
        try:
            (self._hang_folder / "writer").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _write_report(
        self, reason: str, diagnosis: Diagnosis, *, views: Mapping[int, RankView]
    ) -> None:
        """Write the report file and print its first lines; other ranks wait for the diagnosis."""
        now = datetime.now(UTC)
        title = [
            f"nanotrain hang report, {now:%Y-%m-%d %H:%M:%S} UTC",
            f"run folder {self._folder}, {count_of(len(views), 'rank')}",
            f"reason: {reason}",
            f"stacks: {self._hang_folder}/rank-*.txt; a rank without a file was frozen or lost",
        ]
        path = self._folder / REPORT
        recorded = unmatched_collectives(self._recorded(), self._topology)
        text = report_text(
            diagnosis, views, topology=self._topology, title=title, recorded=recorded
        )
        write_text(path, text)
        hang_record(diagnosis, views, time_s=now.timestamp()).write(self._folder)
        # an alarm explains nothing
        facts = [diagnosis.headline] if reason == ALARM else [reason, diagnosis.headline]
        lines = [f"error: {facts[0]}", *facts[1:], *recorded[:MAX_LINES], f"see {path}"]
        message = "\n".join(lines)
        print(message, file=sys.stderr, flush=True)
        found = {"ranks": diagnosis.ranks, "headline": diagnosis.headline}
        write_text(self._hang_folder / WRITTEN, json.dumps(found))

    def _kill_frozen(self) -> bool:
        """Kill stopped ranks of this machine, which cannot handle torchrun's SIGTERM.

        torchrun would wait 30 s for them. Returns whether there was one.
        """
        frozen = [
            process
            for process in self._local
            if process.rank != self._rank and state_of(process) == "T"
        ]
        for process in frozen:
            with suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        return bool(frozen)


def hang_record(
    diagnosis: Diagnosis, views: Mapping[int, RankView], *, time_s: float
) -> HangRecord:
    """The report as a record, by which the failure is judged (`runs/verdict.py`).

    Args:
        diagnosis: diagnosis of the ranks.
        views: views of all ranks.
        time_s: time of the report, in seconds since the epoch.
    """
    ranks = []
    for rank in diagnosis.ranks:
        view = views[rank]
        ranks.append(HangRank(rank, view.host, STATES.get(view.state, view.state)))
    return HangRecord(time_s, "; ".join(diagnosis.headline.splitlines()), tuple(ranks))


def _wait_until(is_done: Callable[[], object], timeout_s: float) -> None:
    """Wait until other ranks have made `is_done` true, at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    while not is_done() and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, MAX_PAUSE_S)


def timeout_of(hang_timeout_s: float | None, distributed_timeout_s: float) -> float:
    """The timeout of the watchdog: as set, or shorter than the timeout of collectives.

    So the report comes before torch ends the run.
    """
    if hang_timeout_s is None:
        return distributed_timeout_s * SHARE_OF_TIMEOUT
    return hang_timeout_s


@contextmanager
def watch_ranks(
    context: ParallelContext, folder: Path, *, timeout_s: float | None
) -> Iterator[None]:
    """Watch the ranks inside the block; a failed collective is reported with the lost rank.

    `timeout_s` is as for `Watchdog`.
    """
    watchdog = Watchdog(context, folder, timeout_s=timeout_s)
    watchdog.start()
    with watchdog.reporting_before_sigterm():
        try:
            yield
        except CommunicationFault as fault:
            if context.generation is not None and context.generation.wait_for_restart(fault):
                watchdog.stop(phase="failed")
                raise
            explained = watchdog.explain(fault)
            watchdog.stop(phase="failed")
            raise explained from fault
        except BaseException:
            watchdog.stop(phase="failed")
            raise
    watchdog.stop(phase="finished")


def _collective_from_json(values: dict[str, Any]) -> RecordedCollective:
    """A collective from JSON, which has a list for the tuple of ranks."""
    return RecordedCollective(**values | {"ranks": tuple(values["ranks"])})
