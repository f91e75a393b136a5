"""Start the ranks of one machine, and start a rank that died again while the others stay.

torchrun's agent ends all ranks where one ends. Here a rank that a signal ended is started again,
alone: its generation of process groups is ended in the store (`comm/generations.py`), and it meets
the others in the next one. A rank that ends with an exit code ends the run, as under torchrun.

    a spare process     has done its imports, and takes the place of the next rank that dies; only
                        one at a time, started once the ranks have met
    a rank that leaves  died again without a new step in between, or did not start again; the others
                        go on without it, if that is allowed and as many as form the layout
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, TCPStore

from nanotrain.comm.generation_store import Fault, FinalError, GenerationStore
from nanotrain.comm.generations import PREFIX, SUPERVISED
from nanotrain.errors import EnvironmentFault
from nanotrain.system import OF_TORCHRUN, describe_exit

LOCAL = "127.0.0.1"  # where ranks of one machine meet
POLL_S = 0.05
STOP_TIMEOUT_S = 30.0  # from SIGTERM to SIGKILL, unless the variable of torchrun is set
STOP_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SPARE = "spare"  # module beside the program that waits to become a rank


class Process(Protocol):
    """A rank, as `subprocess.Popen`."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal to the process, unless it has ended."""


class RankStarter:
    """Starts the program of a rank.

    Args:
        program: module that every rank runs, and its arguments.
        environment: environment that the ranks inherit.
        address: host and port of the store.
        num_ranks: ranks of the job.
    """

    def __init__(
        self,
        program: Sequence[str],
        *,
        environment: Mapping[str, str],
        address: tuple[str, int],
        num_ranks: int,
    ) -> None:
        self._program = program
        self._environment = environment
        self._address = address
        self._num_ranks = num_ranks
        self._spare: subprocess.Popen[str] | None = None

    def start(self, rank: int) -> Process:
        """Start a rank, in the spare process where one is ready."""
        environment = rank_environment(rank, self._num_ranks, address=self._address)
        spare = self._start_in_spare(environment)
        if spare is not None:
            return spare
        command = [sys.executable, "-u", "-m", *self._program]
        return subprocess.Popen(
            command, env={**self._environment, **environment}, start_new_session=True
        )

    def _start_in_spare(self, environment: Mapping[str, str]) -> Process | None:
        """Start a rank in the spare process; None if there is none, or it has died."""
        spare = self._spare
        self._spare = None
        if spare is None:
            return None
        assert spare.stdin is not None, "it was opened with a pipe"
        start = {"environment": environment, "arguments": [*self._program[1:]]}
        try:
            with spare.stdin as pipe:
                pipe.write(json.dumps(start) + "\n")
        except BrokenPipeError:
            spare.wait()
            return None
        return spare

    def prepare(self) -> None:
        """Start a spare process, unless there is one."""
        if self._spare is None:
            command = [sys.executable, "-u", "-m", f"{self._program[0]}.{SPARE}"]
            self._spare = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )

    def close(self) -> None:
        """End the spare process."""
        if self._spare is not None:
            self._spare.kill()
            self._spare.wait()


def rank_environment(rank: int, num_ranks: int, *, address: tuple[str, int]) -> dict[str, str]:
    """The variables of a rank of a job of one machine, named as torchrun's."""
    host, port = address
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        OF_TORCHRUN: "local",
        SUPERVISED: "1",
    }


@dataclass(frozen=True)
class Limits:
    """How long a run goes on without a person.

    Several ranks that die in one generation are one restart.
    """

    max_restarts: int  # restarts in place after which a death ends the run
    # the ranks that go on if at most so many are left; 0: none leaves
    largest_world: Callable[[int], int] = lambda at_most: 0
    # raises where none of so many ranks may leave
    require_smaller_world: Callable[[int], object] = lambda num_ranks: None


class Supervisor:
    """Runs the ranks until all have ended.

    Args:
        store: part of the store that the ranks of this job use for their generations.
        num_ranks: ranks of the job.
        start: starts a rank.
        limits: when a rank leaves, and when a death ends the run.
        stops: signals that were sent on to the ranks, filled while they run; after one no rank is
            started again.
        prepare: called once all ranks have met, again after every restart.
    """

    def __init__(
        self,
        store: GenerationStore,
        num_ranks: int,
        *,
        start: Callable[[int], Process],
        limits: Limits,
        stops: Sequence[int] = (),
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self._store = store
        self._num_ranks = num_ranks
        self._start = start
        self._limits = limits
        self._stops = stops
        self._prepare = prepare
        self._is_prepared = False
        self._num_restarts = 0
        self._members = tuple(range(num_ranks))  # ranks that have not left the run
        self._ended: set[int] = set()  # generations in which a rank died
        self._died_in: dict[int, int | None] = {}  # generation of the last death of a rank
        self.processes: dict[int, Process] = {}

    def run(self) -> dict[int, int]:
        """Start the ranks and wait for their end.

        Returns:
            The exit codes of the ranks that failed, in the order of their ends; negative for a
            signal.
        """
        failed: dict[int, int] = {}
        try:
            for rank in range(self._num_ranks):
                self.processes[rank] = self._start(rank)
            while self.processes and not failed:
                failed = self._poll()
                self._prepare_once()
                time.sleep(POLL_S)
        finally:
            self._end()
        return failed

    def _poll(self) -> dict[int, int]:
        """Start ranks that died again; returns the exit codes of ranks that failed for good."""
        failed = {}
        for rank, process in list(self.processes.items()):
            code = process.poll()
            if code is None:
                continue
            del self.processes[rank]
            if not code or rank not in self._members:
                continue
            is_finished = self._store.is_finished(self._num_ranks)
            if not is_finished and self._goes_on_after(rank, code):
                continue
            failed[rank] = code
            if not is_finished:
                self._end_run(rank, code)
        return failed

    def _goes_on_after(self, rank: int, code: int) -> bool:
        """Start a rank again that ended, or let it leave; False if the run ends with it."""
        is_within = self._num_restarts < self._limits.max_restarts or not self._is_new_fault(rank)
        if self._stops or not is_within:
            return False
        num_staying = self._limits.largest_world(len(self._members) - 1)
        if num_staying and self._is_lost(rank, code):
            self._let_leave(rank, code, num_staying=num_staying)
            return True
        if code < 0:
            self._start_again(rank, code)
        return code < 0

    def _is_lost(self, rank: int, code: int) -> bool:
        """Whether a rank died again without a new step in between, or did not start again.

        Not so one that died of the fault of another rank.
        """
        if rank not in self._died_in:
            return False
        if not self._has_joined(rank):
            return True
        before = self._died_in[rank]
        number = self._store.generation_of(rank)
        assert number is not None, "it has joined"
        begun = range(0 if before is None else before + 1, number + 1)
        has_ended = self._store.current() > number
        is_at_fault = not has_ended or self._store.fault(number).rank == rank
        return code < 0 and is_at_fault and not self._store.has_new_step(begun)

    def _has_joined(self, rank: int) -> bool:
        """Whether a rank has joined a generation since it was started."""
        number = self._store.generation_of(rank)
        return number is not None and number != self._died_in.get(rank)

    def _is_new_fault(self, rank: int) -> bool:
        """Whether the death of a rank is the first of its generation, or came before it joined."""
        return not self._has_joined(rank) or self._store.generation_of(rank) not in self._ended

    def _count_restart(self, rank: int) -> None:
        """Count the restart of a rank that died."""
        if self._is_new_fault(rank):
            self._num_restarts += 1
        number = self._store.generation_of(rank)
        self._died_in[rank] = number
        if number is not None:
            self._ended.add(number)

    def _end_run(self, rank: int, code: int) -> None:
        """Tell the remaining ranks that the run ends; they would wait for the rank that ended."""
        what = describe_exit(code)
        self._store.publish_final_error(FinalError(f"rank {rank}: {what}", is_reported=True))
        self._store.end_generation_of(Fault(rank, what, time.time(), is_death=True))

    def _let_leave(self, rank: int, code: int, *, num_staying: int) -> None:
        """End the generation of a rank that ended, and go on with the first `num_staying` others.

        The rest of the others leave too, and end by themselves.
        """
        self._count_restart(rank)
        staying = [member for member in self._members if member != rank][:num_staying]
        self._members = tuple(staying)
        leaves = f"{describe_exit(code)}; it leaves the run"
        self._store.let_leave(staying, Fault(rank, leaves, time.time(), is_death=True))
        names = ", ".join(map(str, staying))
        print(
            f"rank {rank}: {leaves}, {num_staying} of {self._num_ranks} ranks go on: {names}",
            file=sys.stderr,
            flush=True,
        )
        self._is_prepared = False

    def _start_again(self, rank: int, code: int) -> None:
        """End the generation of a rank that died, and start it again."""
        self._count_restart(rank)
        what = describe_exit(code)
        self._store.end_generation_of(Fault(rank, what, time.time(), is_death=True))
        print(f"rank {rank} is started again: {what}", file=sys.stderr, flush=True)
        self.processes[rank] = self._start(rank)
        self._is_prepared = False

    def _prepare_once(self) -> None:
        """Prepare for the next rank that dies, once the ranks have met."""
        if not self._is_prepared and self._store.decision(self._store.current()) is not None:
            self._is_prepared = True
            self._prepare()

    def _end(self) -> None:
        """End the ranks that are left: first they may save."""
        timeout_s = float(os.environ.get(STOP_TIMEOUT, STOP_TIMEOUT_S))
        deadline = time.monotonic() + timeout_s
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        while any(process.poll() is None for process in self.processes.values()):
            if time.monotonic() > deadline:
                for process in self.processes.values():
                    process.send_signal(signal.SIGKILL)
            time.sleep(POLL_S)


def supervise(
    program: Sequence[str],
    *,
    environment: Mapping[str, str],
    port: int,
    num_ranks: int,
    limits: Limits,
    stops: Sequence[int],
) -> dict[int, int]:
    """Run the ranks of this machine, which meet at a store of this process.

    Args:
        program: as for `RankStarter`.
        environment: as for `RankStarter`.
        port: port of the store; 0 is a free one.
        num_ranks: ranks of the job.
        limits: as for `Supervisor`.
        stops: as for `Supervisor`.

    Returns:
        The exit codes of the ranks that failed, as `Supervisor.run`.

    Raises:
        EnvironmentFault: the port is taken.
    """
    try:
        store = open_local_store(port)
    except OSError as error:
        raise EnvironmentFault(
            f"port {port} of this machine cannot be opened",
            why=os.strerror(error.errno or 0),
            fix="leave --master-port out",
        ) from None
    ranks = RankStarter(
        program, environment=environment, address=(LOCAL, store.port), num_ranks=num_ranks
    )
    supervisor = Supervisor(
        GenerationStore(PrefixStore(PREFIX, store)),
        num_ranks,
        start=ranks.start,
        limits=limits,
        stops=stops,
        prepare=ranks.prepare,
    )
    try:
        return supervisor.run()
    finally:
        ranks.close()


def open_local_store(port: int) -> TCPStore:
    """A store on the loopback interface only; port 0 is a free one.

    Raises:
        OSError: the port is taken.
    """
    listener = socket.create_server((LOCAL, port))
    port = listener.getsockname()[1]
    return TCPStore(
        LOCAL, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
