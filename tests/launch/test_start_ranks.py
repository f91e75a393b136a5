"""The launcher of ranks: torchrun's options, exit codes, signals. The ranks here are programs of a
few lines.
"""

import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.run import get_args_parser

from nanotrain.cli.launch import launch
from nanotrain.errors import ConfigError, EnvironmentFault, TopologyError
from nanotrain.launch import start_ranks as launcher
from nanotrain.launch.start_ranks import (
    DEFAULT_PORT,
    LOCAL_BACKEND,
    LocalRendezvous,
    codes_of,
    first_exit_code,
    local_world_size,
    passing_signals_on,
    read_options,
)
from nanotrain.system import STOPPED
from tests.harness import HANG_S

NAMES = ("OMP_NUM_THREADS", "LOGLEVEL", "TORCHELASTIC_SIGNALS_TO_HANDLE", STOPPED)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start two ranks that run a text as Python, with the folder of the test as first argument."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set in the test is taken back
        monkeypatch.delenv(name)

    def start(program: str, *options: str) -> int:
        header = "import os, signal, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n"
        (tmp_path / "rank_program.py").write_text(header + program)
        return launcher.start_ranks(
            ["rank_program", str(tmp_path)],
            options=["--nproc-per-node=2", *options],
            environment=os.environ,
            check=lambda world_size: None,
        )

    return start


def test_more_processes_than_fit_into_memory_are_refused_before_one_starts(
    start, tmp_path, monkeypatch
):
    program = "Path(sys.argv[1], 'started').touch()"
    monkeypatch.setattr(
        launcher, "memory_per_rank", lambda device, num_ranks: 290_000_000 // num_ranks
    )
    with pytest.raises(
        EnvironmentFault,
        match=r"2 ranks .* each has 145.0 MB .* takes 150.0 MB; start at most 1 on it",
    ):
        start(program)
    assert not (tmp_path / "started").exists()
    monkeypatch.setattr(
        launcher, "memory_per_rank", lambda device, num_ranks: 300_000_000 // num_ranks
    )
    assert start(program) == 0 and (tmp_path / "started").exists()


WAITS = """
def stop(number, frame):
    Path(sys.argv[1], f"saved {rank} {signal.Signals(number).name}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGUSR1, lambda *_: Path(sys.argv[1], f"kept {rank}").touch())
Path(sys.argv[1], f"ready {rank}").touch()
time.sleep(300)
"""


def test_ranks_find_each_other_and_their_threads_and_nothing_is_printed(start, tmp_path, capfd):
    program = "names = ('WORLD_SIZE', 'LOCAL_RANK', 'OMP_NUM_THREADS', 'TORCHELASTIC_RUN_ID')\n"
    program += (
        "Path(sys.argv[1], f'rank {rank}').write_text(' '.join(os.environ[name] for name in names))"
    )
    assert start(program) == 0
    threads = str(launcher.cores_per_rank(2))
    written = [(tmp_path / f"rank {rank}").read_text().split() for rank in (0, 1)]
    assert [row[:3] for row in written] == [["2", "0", threads], ["2", "1", threads]]
    assert written[0][3] == written[1][3]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_passed_on_and_ends_with_zero(start, tmp_path, capfd, number):
    def stop_when_ready() -> None:
        deadline = time.monotonic() + HANG_S / 2
        while len(list(tmp_path.glob("ready *"))) < 2:
            if time.monotonic() > deadline:
                return  # the ranks end by themselves; the signals could end this process
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)
        while len(list(tmp_path.glob("kept *"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop_when_ready)
    before = signal.getsignal(number)
    thread.start()
    assert start(WAITS, "--max-restarts=2") == 0
    thread.join()
    assert sorted(path.name for path in tmp_path.glob("saved *")) == [
        f"saved {r} {number.name}" for r in (0, 1)
    ]
    assert len(list(tmp_path.glob("kept *"))) == 2
    assert signal.getsignal(number) == before and capfd.readouterr() == ("", "")


def test_the_code_is_that_of_the_rank_that_failed_and_its_message_the_only_one(start, capfd):
    program = "if rank == 1:\n    print('error: no disk', file=sys.stderr)\n    sys.exit(2)\ntime.sleep(300)"
    assert start(program) == 2
    assert capfd.readouterr() == ("", "error: no disk\n")


def test_a_rank_that_was_killed_is_named(start, capfd):
    assert (
        start("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(300)")
        == 128 + signal.SIGKILL
    )
    assert capfd.readouterr().err.startswith(
        "error: rank 1 died: SIGKILL ended it (the kernel sends it"
    )


def test_ranks_are_started_again(start, tmp_path):
    program = "mark = Path(sys.argv[1], 'second')\nagain = os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'\n"
    program += "mark.touch() if again else None\nsys.exit(0 if again else 3)"
    assert start(program, "--max-restarts=1") == 0 and (tmp_path / "second").exists()


def test_ranks_that_cannot_form_the_layout_are_not_started():
    line = ["+config=tiny", "--tensor-model-parallel-size", "2"]
    with pytest.raises(TopologyError, match="3 ranks cannot form tp=2"):
        launch(["--nproc-per-node=3"], line, environment={})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--max-restarts=x", "invalid int value: 'x'"),
        ("--nnodes=one", "torchrun's parser refuses it"),
        ("--nnodes=1:2:3", "torchrun's parser refuses it"),
    ],
)
def test_a_wrong_option_is_a_config_error(option, message):
    with pytest.raises(ConfigError, match=message):
        read_options([option], ["nanotrain.train"])


@pytest.mark.parametrize(
    "options", [[], ["--node-rank=1"], ["--rdzv-backend=c10d"], ["--nnodes=1:2"]]
)
def test_machines_without_a_meeting_place_are_refused_at_once(options):
    options = ["--nnodes=2", *options]
    with pytest.raises(ConfigError, match="--nnodes .* without a place .*--rdzv-endpoint HOST"):
        launcher.start_ranks(["nanotrain"], options=options, environment={}, check=print)
    place = "--master-addr=127.0.0.1"
    if "--rdzv-backend=c10d" in options:
        place = "--rdzv-endpoint=127.0.0.1:29500"
    options.append(place)
    launcher.require_meeting_place(read_options(options, ["nanotrain"]), options)


@pytest.mark.parametrize("number", ["two", "0", "-1", ""])
def test_a_wrong_number_of_ranks_is_a_config_error(number):
    with pytest.raises(ConfigError, match=f"--nproc-per-node {number}"):
        local_world_size(number)


@pytest.mark.parametrize("port", [None, DEFAULT_PORT])  # torch 2.10 states its own
def test_one_machine_takes_a_free_port_and_several_meet_where_they_are_told(port, monkeypatch):
    parser = get_args_parser()
    parser.set_defaults(master_port=port)
    monkeypatch.setattr(launcher, "get_args_parser", lambda: parser)
    one_machine = read_options(["--nproc-per-node=2"], ["nanotrain.train", "--save", "x"])
    assert (one_machine.rdzv_backend, one_machine.rdzv_endpoint) == (LOCAL_BACKEND, "127.0.0.1:0")
    assert read_options(["--master-port=1234"], ["nanotrain"]).rdzv_endpoint == "127.0.0.1:1234"
    assert read_options(["--nproc-per-node=2", "--local-addr=a"], ["nanotrain"]).local_addr == "a"
    assert one_machine.log_dir == os.devnull and one_machine.training_script_args == ["--save", "x"]
    many = read_options(
        ["--nnodes=2", "--node-rank=1", "--master-addr=host", "--tee=3"], ["nanotrain"]
    )
    assert (many.rdzv_backend, many.rdzv_endpoint, many.master_addr, many.log_dir) == (
        "static",
        "",
        "host",
        None,
    )
    assert many.local_addr is None


def listening() -> set[str]:
    """Addresses of all listening TCP sockets of this network, as the kernel writes them."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A"}


def test_the_ranks_of_one_machine_meet_where_no_other_machine_can_connect():
    before = listening()
    meeting = LocalRendezvous(RendezvousParameters(LOCAL_BACKEND, "127.0.0.1:0", "local", 1, 1))
    info = meeting.next_rendezvous()
    new = {
        address
        for address in listening() - before
        if address.endswith(f"{info.bootstrap_store_info.master_port:X}")
    }
    assert {address.partition(":")[0] for address in new} == {"0100007F"}  # 127.0.0.1
    info.store.set("key", "value")
    assert meeting.use_agent_store, "else the first rank opens a store of its own"


def failed(**codes: int) -> dict[int, SimpleNamespace]:
    """Failures of ranks (`r0`, `r1`, ...) that ended with these codes, in this order."""
    return {
        int(name[1:]): SimpleNamespace(exitcode=code, timestamp=i)
        for i, (name, code) in enumerate(codes.items())
    }


def test_exit_codes(capfd):
    assert first_exit_code(codes_of(failed(r3=1, r0=2)), is_stopped=False) == 1
    # a rank that lost rank 3 reported it
    assert first_exit_code(codes_of(failed(r3=-9, r0=2)), is_stopped=False) == 2
    assert first_exit_code(codes_of(failed(r3=-15)), is_stopped=True) == 143  # before it could save
    assert capfd.readouterr().err == ""


@pytest.fixture
def launching(start, monkeypatch):
    """Start ranks with another `elastic_launch`, which is called without arguments."""

    def launching(run):
        monkeypatch.setattr(
            launcher, "elastic_launch", lambda config, entrypoint: lambda *arguments: run()
        )
        return start("")

    return launching


def test_a_machine_that_is_not_admitted_is_a_fault(launching):
    with pytest.raises(EnvironmentFault, match="not admitted"):
        launching(lambda: None.is_failed())
    with pytest.raises(AttributeError, match="other"):
        launching(lambda: None.other())


def test_a_signal_before_the_ranks_start_ends_the_launcher():
    environment: dict[str, str] = {}
    with pytest.raises(SystemExit) as caught, passing_signals_on(environment):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert caught.value.code == 143 and environment == {STOPPED: "143"}


def test_a_request_for_a_save_is_no_stop():
    environment: dict[str, str] = {}
    with passing_signals_on(environment) as stops:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
    assert stops == [] and environment == {}


def test_ranks_that_a_stop_ended_are_not_started_again(start, tmp_path):
    program = "life = os.environ['TORCHELASTIC_RESTART_COUNT']\nPath(sys.argv[1], f'starts {life}').touch()\n"
    program += "from nanotrain.system import run_program\n"
    program += "def main():\n    Path(sys.argv[1], f'trains {life}').touch()\n"
    program += "    os.kill(os.getppid(), signal.SIGTERM)\n    time.sleep(300)\nrun_program(main)"
    assert start(program, "--max-restarts=1") == 128 + signal.SIGTERM
    assert {path.name for path in tmp_path.glob("*s [01]")} == {"starts 0", "trains 0", "starts 1"}


def test_a_closed_terminal_is_passed_on_as_a_stop_but_not_under_nohup(monkeypatch):
    sent = []
    monkeypatch.setattr(launcher, "_ranks", lambda: [1])
    monkeypatch.setattr(os, "kill", lambda rank, number: sent.append(number))
    before = signal.getsignal(signal.SIGHUP)
    with passing_signals_on({}) as stops:
        signal.raise_signal(signal.SIGHUP)
    assert stops == sent == [signal.SIGHUP] and signal.getsignal(signal.SIGHUP) == before
    assert "SIGHUP" not in launcher.TORCH_SIGNALS
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with passing_signals_on({}) as stops:
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stops == [] and len(sent) == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RendezvousTimeoutError(),
            "did not meet: RendezvousTimeoutError; give all machines the same",
        ),
        (
            RendezvousConnectionError("The connection to the C10d store has failed."),
            "did not meet: RendezvousConnectionError: The connection .* check that",
        ),
    ],
)
def test_machines_that_do_not_meet_are_a_fault(launching, error, message):
    def run():
        raise error

    with pytest.raises(EnvironmentFault, match=message):
        launching(run)


def test_a_port_that_another_program_uses_is_one_error(start):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            EnvironmentFault, match=rf"did not meet: .* port: {port}, .*leave --master-port out"
        ):
            start("", f"--master-port={port}")


def test_a_wrong_meeting_point_is_one_error(start):
    with pytest.raises(
        EnvironmentFault,
        match="did not meet: ValueError: .*; give all .* --rdzv-endpoint HOST:PORT",
    ):
        start("", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=host:port")


def test_the_exit_codes_of_failed_ranks_are_passed_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "killed_program.py").write_text(program)
    codes: dict[int, int] = {}
    code = launcher.start_ranks(
        ["killed_program"],
        options=["--nproc-per-node=1"],
        environment=os.environ,
        check=lambda world_size: None,
        on_failure=codes.update,
    )
    assert code == 128 + signal.SIGKILL and codes == {0: -signal.SIGKILL}
