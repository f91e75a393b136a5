"""`Watchdog`: a thread per rank that ends a run without progress, and reports which rank is behind.

    this rank began nothing for timeout_s  --+
    a rank of this machine ended           --+-->  alarm: hang-TIME/rank-N.txt   the stacks of this rank
    a rank of this machine gave an alarm   --+            hang-TIME/host-M.json  the records of this machine
                                                   one rank, after GRACE_S:      hang-report.txt, a message
                                                   every rank:                   exit code 2

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
from nanotrain.runs.files import write_text
from nanotrain.watch.processes import RankProcess, lost_port, share_heartbeats, state_of, tcp_ports
from nanotrain.watch.report import Diagnosis, RankView, diagnose, report_text, unmatched_collectives

REPORT, WRITTEN = "hang-report.txt", "written"
MAX_POLL_S = 1.0
# between two looks for files of others, the first and the longest: thousands of ranks look
POLL_S = 0.05, 0.5
# a reason that leaves the cause to the diagnosis
ALARM = "another rank of this machine gave an alarm"
MAX_LINES = 4  # process groups whose collectives the message lists; the report lists all
# from the first alarm to the report, so that the other ranks can notice it and write their files
GRACE_S = 3.0
# from the end of a rank to the alarm; a failed collective usually ends this rank before
LOST_S = 2.0
UNTIMED_PHASES = ("start", "checkpoint")  # their duration depends on the disk
# of the timeout of collectives, after which torch would end the run without a report
SHARE_OF_TIMEOUT = 0.9


class Watchdog:
    """Watches the ranks of this machine from a separate thread.

    Args:
        context: device and process groups of this rank.
        folder: run folder, for the report.
        timeout_s: seconds in which a rank begins something unless it hangs; 0 watches only for lost
            ranks; None: a share of the timeout of collectives, which may be lowered during the run.
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
        self._topology, self._rank, self._heartbeat = (
            context.topology,
            context.rank,
            context.heartbeat,
        )
        self._context, self._folder, self._hang_timeout_s, self._end = (
            context,
            folder,
            timeout_s,
            end,
        )
        self._processes, self._records = share_heartbeats(context.heartbeat, context.control)
        # of this machine
        self._local = [process for process in self._processes if process.rank in self._records]
        now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        self._hang_folder = folder / f"hang-{all_gather_object(now, context.control)[0]}"
        self._stopped, self._reporting = threading.Event(), threading.Lock()
        self._beats, self._moved = -1, time.monotonic()
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
        """Report a failed collective with the rank that was lost; the fault itself if no report can
        be written.
        """
        self._stopped.set()
        _wait_until(self._lost, GRACE_S)  # a killed process ends a moment later than its sockets
        with self._reporting:
            headline = self._report(f"{fault.what}: {fault.why}")
        return fault if headline is None else ReportedFault(headline)

    @contextmanager
    def reporting_before_sigterm(self) -> Iterator[None]:
        """Ignore SIGTERM once a rank is lost: torchrun sends it immediately, but the report takes a
        moment.

        Without effect outside the main thread, because other threads cannot handle signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

        def on_signal(number: int, _frame: FrameType | None) -> None:
            if not self._lost():
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

    def _watch(self) -> None:
        while not self._stopped.wait(min(MAX_POLL_S, self._timeout_s / 10 or MAX_POLL_S)):
            reason = self.reason_to_end(time.monotonic())
            if reason:
                # The lock is held until the process ends: killing a frozen rank fails the
                # collective that the main thread waits for, which would begin a second report and
                # overwrite the stacks of this one.
                with self._reporting:
                    if self._stopped.is_set():  # the main thread reported meanwhile
                        return
                    self._report(reason)
                    sys.stdout.flush()
                    self._end_frozen()
                    self._end(EXIT_CODE)
                return

    def reason_to_end(self, now: float) -> str:
        """Why the run has to end; "" if it may continue. `now` is in seconds and never decreases."""
        is_slow_by_nature = read_record(self._records[self._rank]).phase in UNTIMED_PHASES
        # stopped: no disk is that slow
        is_slow_by_nature &= all(state_of(process) != "T" for process in self._local)
        if self._heartbeat.beats != self._beats or is_slow_by_nature:
            self._beats, self._moved = self._heartbeat.beats, now
        lost, still_s = self._lost(), now - self._moved
        self._lost_since = (now if self._lost_since is None else self._lost_since) if lost else None
        if self._timeout_s and still_s >= self._timeout_s:
            return f"rank {self._rank} began nothing for {still_s:.0f} s (--hang-timeout-s {self._timeout_s:g})"
        if self._lost_since is not None and now - self._lost_since >= LOST_S:
            return f"rank {lost[0].rank} ended"
        return (
            ALARM
            if any(read_record(record).is_alarmed for record in self._records.values())
            else ""
        )

    def _lost(self) -> list[RankProcess]:
        """The ranks of this machine whose process ended before the run did."""
        return [
            process
            for process in self._local
            if not state_of(process)
            and read_record(self._records[process.rank]).phase not in ("finished", "failed")
        ]

    def _report(self, reason: str) -> str | None:
        """Write the files of this rank and, on one rank, the report; returns its headline.

        None if the run folder cannot be written.
        """
        self._heartbeat.alarm()
        try:
            self._hang_folder.mkdir(exist_ok=True)
            with (self._hang_folder / f"rank-{self._rank:05d}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            self._write_records()
            write_text(
                self._file("connections"), json.dumps({"ports": self._ports, "reason": reason})
            )
            collectives = [asdict(each) for each in recorded_collectives()]
            write_text(self._file("collectives"), json.dumps(collectives))
            if not self._is_writer():  # which alone lists and reads the files of all
                # awaited: torchrun ends all ranks as soon as one has ended
                written = self._hang_folder / WRITTEN
                _wait_until(written.exists, GRACE_S / 3)
                self._write_records()
                _wait_until(written.exists, 2 * GRACE_S)
                return written.read_text() if written.exists() else reason
            _wait_until(self._all_have_written, GRACE_S)
            self._write_records()  # the states of frozen and lost processes as they are now
            views = self._views()
            diagnosis = diagnose(views, self._topology, cut=self._cut())
            self._write_report(reason, diagnosis, views=views)
            return diagnosis.headline
        except (OSError, EnvironmentFault) as error:
            print(
                f"error: {reason}; no report: {self._folder} cannot be written: {error}",
                file=sys.stderr,
                flush=True,
            )
            return None

    def _write_records(self) -> None:
        """The records of all ranks of this machine; each of its ranks writes the same."""
        records = {
            process.rank: {
                "state": state_of(process),
                "record": self._records[process.rank].tolist(),
            }
            for process in self._local
        }
        write_text(self._hang_folder / f"host-of-rank-{min(records):05d}.json", json.dumps(records))

    def _file(self, name: str) -> Path:
        return self._hang_folder / f"{name}-{self._rank:05d}.json"

    def _cut(self) -> dict[int, int]:
        """The rank at the other end of a connection that a rank lost, by rank, where the error
        names its port.
        """
        files = {
            int(path.stem[-5:]): json.loads(path.read_text())
            for path in self._hang_folder.glob("connections-*")
        }
        owners = {port: rank for rank, each in files.items() for port in each["ports"]}
        ends = {rank: lost_port(each["reason"]) for rank, each in files.items()}
        return {
            rank: owners[port]
            for rank, port in ends.items()
            if port in owners and owners[port] != rank
        }

    def _recorded(self) -> dict[int, list[RecordedCollective]]:
        """The collectives in the flight recorders of all ranks that could write theirs."""
        return {
            int(path.stem.removeprefix("collectives-")): [
                _collective_of(each) for each in json.loads(path.read_text())
            ]
            for path in sorted(self._hang_folder.glob("collectives-*.json"))
        }

    def _all_have_written(self) -> bool:
        """Whether all ranks have written their stacks and collectives, and all machines their
        records.
        """
        names = ("rank-*.txt", "collectives-*.json", "host-of-rank-*.json")
        stacks, collectives, hosts = (len(list(self._hang_folder.glob(name))) for name in names)
        machines = {process.machine for process in self._processes}
        return stacks == collectives == len(self._processes) and hosts >= len(machines)

    def _views(self) -> dict[int, RankView]:
        views = {
            each.rank: RankView(each.rank, each.host, each.pid, "?") for each in self._processes
        }
        for path in sorted(self._hang_folder.glob("host-of-rank-*.json")):
            for rank, entry in json.loads(path.read_text()).items():
                beat = read_record(memoryview(array("q", entry["record"])))
                views[int(rank)] = replace(views[int(rank)], state=entry["state"], beat=beat)
        return views

    def _is_writer(self) -> bool:
        """Whether this rank writes the report: the first rank that calls this does."""
        try:
            os.close(
                os.open(self._hang_folder / "writer", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            )
        except FileExistsError:
            return False
        return True

    def _write_report(
        self, reason: str, diagnosis: Diagnosis, *, views: Mapping[int, RankView]
    ) -> None:
        title = [
            f"nanotrain hang report, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            f"run folder {self._folder}, {count_of(len(views), 'rank')}",
            f"reason: {reason}",
            f"stacks: {self._hang_folder}/rank-*.txt; a rank without a file was frozen or lost",
        ]
        path = self._folder / REPORT
        recorded = unmatched_collectives(self._recorded(), self._topology)
        write_text(
            path,
            report_text(diagnosis, views, topology=self._topology, title=title, recorded=recorded),
        )
        # an alarm explains nothing
        facts = [diagnosis.headline] if reason == ALARM else [reason, diagnosis.headline]
        lines = [f"error: {facts[0]}", *facts[1:], *recorded[:MAX_LINES], f"see {path}"]
        print("\n".join(lines), file=sys.stderr, flush=True)
        write_text(self._hang_folder / WRITTEN, diagnosis.headline)

    def _end_frozen(self) -> None:
        """Kill stopped ranks of this machine: they cannot handle torchrun's SIGTERM, and it would
        wait for 30 s.
        """
        for process in self._local:
            if process.rank != self._rank and state_of(process) == "T":
                with suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)


def _wait_until(is_done: Callable[[], object], timeout_s: float) -> None:
    """Wait for what other ranks do, at most `timeout_s`."""
    deadline, pause_s = time.monotonic() + timeout_s, POLL_S[0]
    while not is_done() and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, POLL_S[1])


def timeout_of(hang_timeout_s: float | None, distributed_timeout_s: float) -> float:
    """The timeout of the watchdog: as set, else shorter than that of collectives, so that the
    report comes first.
    """
    return distributed_timeout_s * SHARE_OF_TIMEOUT if hang_timeout_s is None else hang_timeout_s


@contextmanager
def watch_ranks(
    context: ParallelContext, folder: Path, *, timeout_s: float | None
) -> Iterator[None]:
    """Watch the ranks while the block runs; a collective that fails in it is reported with the lost
    rank.

    `timeout_s` is as for `Watchdog`.
    """
    watchdog = Watchdog(context, folder, timeout_s=timeout_s)
    watchdog.start()
    with watchdog.reporting_before_sigterm():
        try:
            yield
        except CommunicationFault as fault:
            explained = watchdog.explain(fault)
            watchdog.stop(phase="failed")
            raise explained from fault
        except BaseException:
            watchdog.stop(phase="failed")
            raise
    watchdog.stop(phase="finished")


def _collective_of(values: dict[str, Any]) -> RecordedCollective:
    """A collective from JSON, which has a list for the tuple of ranks."""
    return RecordedCollective(**values | {"ranks": tuple(values["ranks"])})
