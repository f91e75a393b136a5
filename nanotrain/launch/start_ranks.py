"""Start the ranks of this machine as torchrun does, and return their exit code.

Differences from `torchrun -m nanotrain.train`: only the output of the ranks is printed; SIGTERM,
SIGINT and SIGHUP are sent on to the ranks, which save and end by themselves, so the exit code is 0;
SIGUSR1 is sent on, too; `nohup` has an effect; user mistakes are found before a rank starts.
"""

import io
import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path

import torch
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from nanotrain.comm.device import memory_per_rank
from nanotrain.comm.meeting import require_host, require_store
from nanotrain.errors import ConfigError, EnvironmentFault
from nanotrain.launch.supervisor import LOCAL, Limits, open_local_store, supervise
from nanotrain.quantities import count_of, describe_bytes
from nanotrain.scheduler import require_one_launcher
from nanotrain.system import (
    STOPPED,
    cores_per_rank,
    describe_exit,
    handling_signals,
    require_open_files,
)

TORCH_SIGNALS = "SIGQUIT"  # torch ends the ranks
BYTES_PER_PROCESS = 150_000_000  # measured: 160 MB are private to a process that has imported torch
LOCAL_BACKEND = "nanotrain-local"
DEFAULT_PORT = 29500  # default of torchrun's --master-port
# options that only torchrun's agent has
AGENT_OPTIONS = (
    "--max-restarts",
    "--monitor-interval",
    "--log-dir",
    "--redirects",
    "--tee",
    "--local-ranks-filter",
    "--numa-binding",
)


def start_ranks(
    program: Sequence[str],
    *,
    options: Sequence[str],
    environment: MutableMapping[str, str],
    check: Callable[[int], object],
    on_failure: Callable[[Mapping[int, int]], object] | None = None,
    in_place: Limits | None = None,
) -> int:
    """Run a program with one process per rank of this machine.

    Args:
        program: module that every rank runs, and its arguments.
        options: torchrun's options.
        environment: environment of this process; OMP_NUM_THREADS is set in it unless it is there.
        check: function that raises for a number of ranks that the program cannot run on.
        on_failure: function that is called with the exit codes of failed ranks, negative for a
            signal, unless the job was stopped.
        in_place: how often a rank that died is started again while the others stay; None for
            torchrun's agent, which ends all ranks.

    Returns:
        The exit code.

    Raises:
        NanotrainError: a wrong option, ranks that cannot form the layout, or machines that do not
            meet.
    """
    args = check_ranks(program, options=options, check=check, in_place=in_place)
    require_meeting_place(args, options)
    require_one_launcher(environment, num_machines=parse_min_max_nnodes(args.nnodes)[1])
    num_local = local_world_size(args.nproc_per_node)
    require_open_files(num_ranks=num_local)
    require_host_memory(num_local)
    environment.setdefault("OMP_NUM_THREADS", str(cores_per_rank(num_local)))
    with silent_logs(wanted="LOGLEVEL" in environment), passing_signals_on(environment) as stops:
        why_agent = reason_for_agent(args, options) if in_place is not None else ""
        if why_agent:
            print(
                f"--inprocess-restart {why_agent}: torchrun's agent starts the ranks, and ends all "
                "of them where one dies, so that no rank leaves; errors that a rank raises are "
                "restarted in place",
                file=sys.stderr,
                flush=True,
            )
        elif in_place is not None:
            failed = supervise(
                program,
                environment=environment,
                port=int(args.rdzv_endpoint.rpartition(":")[2]),
                num_ranks=num_local,
                limits=in_place,
                stops=stops,
            )
            return _end_of_job(failed, stops, on_failure=on_failure)
        return run_ranks(args, stops, on_failure=on_failure)


def reason_for_agent(args: Namespace, options: Sequence[str]) -> str:
    """Why only torchrun's agent can start the ranks; empty if it need not."""
    own = [option.partition("=")[0] for option in options if option.startswith(AGENT_OPTIONS)]
    if own:
        return f"with {', '.join(own)}"
    return "" if args.rdzv_backend == LOCAL_BACKEND else "on several machines"


def _end_of_job(
    failed: Mapping[int, int],
    stops: Sequence[int],
    *,
    on_failure: Callable[[Mapping[int, int]], object] | None,
) -> int:
    """The exit code of a job, from its failed ranks in the order of their ends."""
    if not failed:
        return 0
    code = first_exit_code(failed, is_stopped=bool(stops))
    if on_failure is not None and not stops:
        on_failure(failed)
    return code


def check_ranks(
    program: Sequence[str],
    *,
    options: Sequence[str],
    check: Callable[[int], object],
    in_place: Limits | None = None,
) -> Namespace:
    """Parse torchrun's options and check that their number of ranks fits the layout.

    Arguments as for `start_ranks`.

    Raises:
        NanotrainError: a wrong option, or a number of ranks that does not fit.
    """
    args = read_options(options, program)
    num_local = local_world_size(args.nproc_per_node)
    min_nodes, max_nodes = parse_min_max_nnodes(args.nnodes)
    if min_nodes < 1:
        raise ConfigError(
            f"--nnodes is {args.nnodes}", why="a job has at least one machine", fix="--nnodes 1"
        )
    if args.standalone and max_nodes > 1:  # torchrun would wait for machines that cannot find it
        why = "--standalone starts a job of one machine"
        raise ConfigError(
            f"--standalone with --nnodes {args.nnodes}", why=why, fix="leave one of them out"
        )
    if min_nodes == max_nodes:  # otherwise the ranks check the number that they find
        check(num_local * max_nodes)
    if in_place is not None and not reason_for_agent(args, options):
        in_place.require_smaller_world(num_local)
    return args


def require_meeting_place(args: Namespace, options: Sequence[str]) -> None:
    """Check that several machines have an address at which they can meet.

    An address of this machine counts only if the user wrote it.

    Raises:
        ConfigError: torchrun's options name none.
    """
    _, max_nodes = parse_min_max_nnodes(args.nnodes)
    if max_nodes == 1 or args.rdzv_endpoint:
        return
    is_written = any(option.startswith("--master-addr") for option in options)
    is_elsewhere = args.master_addr not in (LOCAL, "localhost")  # set by a variable of torchrun
    if args.rdzv_backend != "static" or not (is_written or is_elsewhere):
        raise ConfigError(
            f"--nnodes {args.nnodes} without a place where the machines meet",
            why=f"each machine would wait at its own {LOCAL} for the others",
            fix="give all machines --rdzv-backend c10d --rdzv-id JOB --rdzv-endpoint HOST:29500, "
            "where HOST is one of them",
        )


def require_host_memory(num_ranks: int) -> None:
    """Check that the memory of this machine suffices for the processes, before models are built.

    Raises:
        EnvironmentFault: they do not; the system would end one of them, or hang.
    """
    share = memory_per_rank(torch.device("cpu"), num_ranks)
    if share is not None and share < BYTES_PER_PROCESS:
        needed = describe_bytes(BYTES_PER_PROCESS)
        why = (
            f"each has {describe_bytes(share)} of its memory, and Python with torch takes {needed}"
        )
        fix = f"start at most {share * num_ranks // BYTES_PER_PROCESS:,} on it"
        raise EnvironmentFault(f"{count_of(num_ranks, 'rank')} on this machine", why=why, fix=fix)


@contextmanager
def silent_logs(*, wanted: bool) -> Iterator[None]:
    """Silence repeated log lines of torch's agent, unless LOGLEVEL (`wanted`) is set."""
    before = logging.root.manager.disable
    if not wanted:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def read_options(options: Sequence[str], program: Sequence[str]) -> Namespace:
    """Parse torchrun's options with its own parser.

    Raises:
        ConfigError: an option that the parser refuses.
    """
    refused = io.StringIO()
    logs = [f"--log-dir={os.devnull}"]
    if any(option.startswith(("--log-dir", "--tee", "--redirects")) for option in options):
        logs = []
    parser = get_args_parser()
    # torch 2.10; one that the environment sets is a string
    if parser.get_default("master_port") == DEFAULT_PORT:
        parser.set_defaults(master_port=None)
    try:
        with redirect_stderr(refused):
            args = parser.parse_args([*options, *logs, "--module", *program])
            parse_min_max_nnodes(args.nnodes)
    except (SystemExit, RuntimeError, ValueError) as error:
        message = refused.getvalue().rpartition("error: ")[2].strip() or str(error)
        raise ConfigError(
            message, why="torchrun's parser refuses it", fix="torchrun --help describes it"
        ) from None
    if args.standalone or _is_one_machine(args):
        # unless a port is set a free one, so that two jobs do not meet
        args.rdzv_backend = LOCAL_BACKEND
        args.rdzv_endpoint = f"{LOCAL}:{args.master_port or 0}"
        args.rdzv_id = "local"
    args.master_port = args.master_port or DEFAULT_PORT
    return args


def _is_one_machine(args: Namespace) -> bool:
    """Whether options name no other machine."""
    if args.rdzv_backend != "static" or args.rdzv_endpoint:
        return False
    _, max_nodes = parse_min_max_nnodes(args.nnodes)
    return max_nodes == 1 and args.master_addr in (LOCAL, "localhost")


class LocalRendezvous(StaticTCPRendezvous):
    """torch's meeting point for one machine, with a store on the loopback interface only.

    Args:
        params: torch's parameters; the port in their endpoint is 0 for a free one.

    Raises:
        RendezvousConnectionError: the port is taken.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        port = int(params.endpoint.rpartition(":")[2])
        try:
            store = open_local_store(port)
        except OSError as error:
            raise RendezvousConnectionError(
                f"port: {port}, {os.strerror(error.errno or 0)}"
            ) from None
        super().__init__(LOCAL, store.port, rank=0, world_size=1, run_id=params.run_id, timeout=60)
        self._store = store

    def get_backend(self) -> str:
        """Its name, which torch compares with the option."""
        return LOCAL_BACKEND


rendezvous_handler_registry.register(LOCAL_BACKEND, LocalRendezvous)


def local_world_size(text: str) -> int:
    """The ranks of this machine: a number, or one per device for auto, gpu, cpu.

    Raises:
        ConfigError: no number of ranks, or no such device.
    """
    try:
        number = determine_local_world_size(text)
    except ValueError as error:
        why = str(error) or "it is neither a number nor auto, cpu or gpu"
        raise ConfigError(
            f"--nproc-per-node {text}", why=why, fix="give the number of ranks of this machine"
        ) from None
    if number < 1:
        raise ConfigError(
            f"--nproc-per-node {text}", why="a job has at least one rank", fix="--nproc-per-node 1"
        )
    return number


def run_ranks(
    args: Namespace,
    stops: Sequence[int],
    *,
    on_failure: Callable[[Mapping[int, int]], object] | None = None,
) -> int:
    """Run the ranks until they end; returns the exit code.

    Args:
        args: torchrun's arguments.
        stops: signals that were sent on to the ranks, filled while they run.
        on_failure: as for `start_ranks`.

    Raises:
        ConfigError: options that contradict each other.
        EnvironmentFault: the machines of the job do not meet.
    """
    try:
        config, entrypoint, arguments = config_from_args(args)
    except (AssertionError, ValueError, OSError) as error:
        raise ConfigError(
            str(error), why="torchrun refuses it", fix="torchrun --help describes the options"
        ) from None
    config.signals_to_handle = TORCH_SIGNALS
    _meet_machines(args, config)
    try:
        elastic_launch(config, entrypoint)(*arguments)
    except ChildFailedError as error:
        return _end_of_job(codes_of(error.failures), stops, on_failure=on_failure)
    except SignalException as error:  # TORCH_SIGNALS
        return 128 + int(error.sigval)
    except (ValueError, RendezvousError, DistError) as error:
        raise EnvironmentFault(
            "the machines of this job did not meet",
            why=f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": "),
            fix="give all machines the same --nnodes, --rdzv-backend, --rdzv-id "
            "and --rdzv-endpoint HOST:PORT, and check that port; "
            "on one machine leave --master-port out",
        ) from None
    except AttributeError as error:
        # torch has no result if this machine was not admitted
        if error.name != "is_failed":
            raise
        why, fix = "the job has ended, or has all its machines", "start it with another --rdzv-id"
        raise EnvironmentFault(
            "this machine was not admitted to the job", why=why, fix=fix
        ) from None
    return 0


def _meet_machines(args: Namespace, config: LaunchConfig) -> None:
    """Print which machines the job waits for, and require that the first can be reached."""
    if config.max_nodes > 1:
        rendezvous = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
        print(f"waiting for {args.nnodes} machines at {rendezvous}", file=sys.stderr, flush=True)
    if args.rdzv_backend == "static" and not args.rdzv_endpoint and args.node_rank:
        require_host(args.master_addr)
        require_store(
            (args.master_addr, args.master_port), timeout_s=float(config.rdzv_configs["timeout"])
        )


def codes_of(failures: Mapping[int, ProcessFailure]) -> dict[int, int]:
    """The exit codes of failed ranks, in the order of their ends."""
    in_order = sorted(failures.items(), key=lambda item: item[1].timestamp)
    return {rank: failure.exitcode for rank, failure in in_order}


def first_exit_code(failed: Mapping[int, int], *, is_stopped: bool) -> int:
    """The exit code of a failed job: the code of the first failed rank, or 128 plus a signal.

    Args:
        failed: exit codes by rank, in the order of their ends.
        is_stopped: whether a signal was sent on to the ranks, so that a rank that it ended needs no
            message.
    """
    for code in failed.values():  # ranks that lost another report it and end with code 2
        if code > 0:
            return code
    rank = next(iter(failed))
    signal_number = -failed[rank]
    if not is_stopped:  # a killed rank cannot report anything
        print(
            f"error: rank {rank} died: {describe_exit(-signal_number)}",
            file=sys.stderr,
            flush=True,
        )
    return 128 + signal_number


@contextmanager
def passing_signals_on(environment: MutableMapping[str, str]) -> Iterator[list[int]]:
    """Forward `stop_signals` and SIGUSR1 to the ranks; yields the stops received.

    The ranks have sessions of their own.

    torchrun would end the ranks after 30 s and the job with an error. Here a rank has the time it
    needs to finish its step and save. Before the ranks have started, a stop ends this process.

    Args:
        environment: environment that the ranks inherit; after a stop, ranks that torch starts again
            end at once.
    """
    stops: list[int] = []

    def on_signal(number: int) -> None:
        """Pass a signal on to all ranks; remember it if it ends the run."""
        ranks = _ranks()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)
        if number == signal.SIGUSR1:  # the ranks save and continue
            return
        stops.append(number)
        environment[STOPPED] = str(128 + number)
        if not ranks:
            raise SystemExit(128 + number)

    with handling_signals(on_signal):
        yield stops


def _ranks() -> list[int]:
    """The process ids of the ranks: children of this process, leaders of their own sessions."""
    ranks = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            _, parent, _, session, *_ = path.read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid() and session == path.parent.name:
                ranks.append(int(session))
    return ranks
