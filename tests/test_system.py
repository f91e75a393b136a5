"""A process from its start to its end, and its host: imports, output, exit code, launcher; cores
and memory.
"""

import errno
import gc
import os
import pty
import resource
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from nanotrain import system
from nanotrain.cli import main as cli
from nanotrain.errors import EnvironmentFault
from nanotrain.system import (
    end_without_collection,
    importing_torch,
    outlive_output,
    package_version,
    require_folders,
    require_open_files,
    without_collection,
)
from tests.harness import HANG_S

# of torch, of Hugging Face, of pictures and reports, and of what hooks need only where they are
# asked for
NEVER = (
    "torch._dynamo",
    "torch._inductor",
    "transformers",
    "datasets",
    "matplotlib",
    "pandas",
    "scipy",
    "pyarrow",
)
# which imports Triton where it is installed
NEVER += ("triton", "nanotrain.kernels.triton_softmax")
NEVER += (
    "wandb",
    "tensorboard",
    "torch.utils.tensorboard",
    "prometheus_client",
    "mlflow",
    "submitit",
    "lm_eval",
    "IPython",
)
# before the first step; torch imports sympy for the first backward pass, and plotly draws the
# report at the end
BUILT = (*NEVER, "sympy", "torch.fx.experimental.symbolic_shapes", "plotly")
BUILT += (
    "nanotrain.interop.hf.families",
    "nanotrain.interop.hf.weights",
    "nanotrain.report.page",
    "nanotrain.report.history",
)
CODE = """
import gc, sys
from types import SimpleNamespace
from nanotrain.config.load import load, load_config
from nanotrain.train.main import main
line, never, built = {line!r}, {never!r}, {built!r}

def imported(names):
    return [name for name in names if name in sys.modules]

load(["--vocab-size=256"], to_train=False)
assert not imported(["hydra"]), "no file is chosen, so there is nothing to compose"
assert main([*line, "--train-iters=0"]) == 0 and not imported(built), f"to build a run: {{imported(built)}}"
assert gc.isenabled() and gc.get_freeze_count() > 100_000
from nanotrain.inference.checkpoint import load_stage
checkpoint = SimpleNamespace(config=load_config(line), manifest=None)
checkpoint.read_params = lambda wanted: None
load_stage(checkpoint)
from nanotrain.inference.generate import generate
assert not imported(built), f"to load a model: {{imported(built)}}"
assert main([*line, "--train-iters=1"]) == 0 and not imported(never), f"to train: {{imported(never)}}"
"""


def test_a_run_and_a_generation_import_only_what_they_need(tmp_path: Path) -> None:
    line = [
        "+config=tiny",
        "--mock-data",
        "--vocab-size=256",
        "--num-layers=1",
        "--global-batch-size=2",
    ]
    line += ["--eval-interval=0", "--generate-tokens=0", "--no-report", f"--run-dir={tmp_path}"]
    code = CODE.format(line=line, never=NEVER, built=BUILT)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_collection_is_as_before_where_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", ModuleType("torch")))
    frozen = gc.get_freeze_count()
    with importing_torch():
        assert gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == frozen


def test_without_a_folder_for_temporary_files_there_is_one_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with (
        pytest.raises(EnvironmentFault, match=r"temporary files: No usable .*'/tmp'.*; .*TMPDIR"),
        importing_torch(),
    ):
        raise AssertionError("torch would be imported")
    assert cli.main(["runs"]) == 2


def test_a_deleted_working_folder_is_one_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(
        EnvironmentFault, match="no working folder, .*: No such file .*; enter a folder .*cd"
    ):
        require_folders()


def test_collections_pause_and_go_on_after_an_error() -> None:
    with pytest.raises(ValueError), without_collection():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled(), "paused by the caller, who enables them again"
    finally:
        gc.enable()


@pytest.mark.parametrize("has_triton", [False, True])
def test_the_last_collection_runs_only_where_triton_would_report_what_is_left(
    has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    if has_triton:
        monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    gc.freeze()
    try:
        end_without_collection()
        assert (gc.isenabled(), gc.get_freeze_count() == 0) == (has_triton, has_triton)
    finally:
        gc.enable()
        gc.freeze()  # or every run of a later test would visit all objects of the suite


@pytest.mark.parametrize(("world_size", "ends_at_once"), [("1", False), ("2", True)])
def test_one_of_several_ranks_ends_at_once_after_an_error(
    monkeypatch, capfd, world_size, ends_at_once
):
    codes: list[int] = []

    def end_at_once(code: int) -> None:
        codes.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(system.os, "_exit", end_at_once)
    monkeypatch.setattr(system, "end_without_collection", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    before = signal.getsignal(signal.SIGUSR1)
    for run, code in ((lambda: 2, 2), (lambda: 1 / 0, 1)):
        with pytest.raises(SystemExit, match=str(code)):
            system.run_program(run)
    signal.signal(signal.SIGUSR1, before)
    assert codes == ([2, 1] if ends_at_once else [])
    assert "ZeroDivisionError" in capfd.readouterr().err


RANK = """
import os, sys, time
from nanotrain.system import end_with_launcher
end_with_launcher({"TORCHELASTIC_RUN_ID": "1"} if sys.argv[1] != "shell" else {})
print(os.getpid(), flush=True)
time.sleep(60)
"""
LAUNCHER = (
    "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"
)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return bool(status.stdout.strip()) and not status.stdout.startswith("Z")


@pytest.mark.parametrize(("by", "survives"), [("torchrun", False), ("shell", True)])
def test_a_killed_launcher_leaves_no_rank(by, survives):
    command = [sys.executable, "-c", LAUNCHER, RANK, by]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    rank = int(launcher.stdout.readline())
    try:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        end = time.monotonic() + (0.5 if survives else HANG_S)
        while is_running(rank) and time.monotonic() < end:
            time.sleep(0.05)
        assert is_running(rank) is survives
    finally:
        if is_running(rank):
            os.kill(rank, signal.SIGKILL)


ROOT = Path(__file__).parents[1]


def test_a_training_goes_on_after_its_terminal_has_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    master, terminal = pty.openpty()
    with open(terminal, "w", encoding="latin-1") as stream:
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            monkeypatch.setattr(sys, name, stream)
        outlive_output("it goes on")
        print("a ä €")
        sys.stdout.flush()
        assert os.read(master, 100) == b"a \xe4 \\u20ac\r\n" and sys.stdout is not stream
        os.close(master)
        for name in ("stdout", "stderr", "stdout"):
            print("more", file=getattr(sys, name), flush=True)


def _run(code: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """Run Python through a shell's redirection."""
    code = f"import sys\nfrom nanotrain.system import outlive_output, run_program\n{code}"
    command = ["bash", "-c", f'set -o pipefail; "{sys.executable}" -c "$0" {redirection}', code]
    return subprocess.run(command, check=False, capture_output=True, text=True)


LINES = "for number in range(3): print('x' * 99999, flush=True)\n"
NOTE = "outlive_output('it goes on')\n"


@pytest.mark.parametrize(
    ("redirection", "reason"),
    [("> /dev/full", "No space left on device"), ("| true", "Broken pipe")],
)
def test_a_training_goes_on_without_its_output_and_says_so_once(
    redirection: str, reason: str
) -> None:
    done = _run(f"{NOTE}{LINES}print('done', file=sys.stderr)", redirection)
    note = f"standard output cannot be written: {reason}; it goes on"
    assert (done.returncode, done.stderr.splitlines()) == (0, [note, "done"])


def test_a_pipe_that_nothing_reads_ends_other_commands_quietly() -> None:
    done = _run("run_program(lambda: [print('x' * 99999) for number in range(3)] and 7)", "| true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("redirection", ["2> /dev/full", "2>&1 | true"])
def test_errors_that_cannot_be_printed_do_not_end_a_training(redirection: str) -> None:
    assert (
        _run(
            f"{NOTE}for number in range(3): print('x' * 99999, file=sys.stderr)", redirection
        ).returncode
        == 0
    )


@pytest.mark.parametrize("program", ["-m nanotrain.train", "examples/pretrain_gpt.py"])
def test_a_run_ends_and_saves_where_the_disk_of_its_output_is_full(
    tmp_path: Path, program: str
) -> None:
    line = "--mock-data --vocab-size 64 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
    line += " --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 2"
    command = f'exec "{sys.executable}" {program} {line} --eval-interval 0 --no-report --run-dir "$0" > /dev/full'
    shell = ["sh", "-c", command, str(tmp_path)]
    done = subprocess.run(shell, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr.count(
            "No space left on device; training goes on, its steps are in metrics.jsonl"
        )
        == 1
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


MEMORY = "MemTotal:       9000000 kB\nMemFree:         1000 kB\nMemAvailable:    8000000 kB\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write files below /, in the test's folder; the machine has 8 cores and 8.192 GB available."""
    monkeypatch.setattr(system, "core_limit", system.core_limit.__wrapped__)  # that of these files
    monkeypatch.setattr(system, "PROC", tmp_path / "proc")
    monkeypatch.setattr(system, "CONTROL_GROUPS", tmp_path / "sys/fs/cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    write({"proc/meminfo": MEMORY})
    return write


def test_without_control_groups_the_machine_counts(write) -> None:
    assert (system.usable_cores(), system.core_limit(), system.available_memory()) == (
        8,
        None,
        8_192_000_000,
    )


def test_nothing_is_known_without_proc(write, tmp_path: Path) -> None:
    (tmp_path / "proc" / "meminfo").unlink()
    assert system.available_memory() is None


@pytest.mark.parametrize(
    ("cpu", "cores"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("5000 100000", 1),
        ("6400000 100000", 8),
    ],
)
def test_cores_of_version_2(write, cpu: str, cores: int) -> None:
    write({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{cpu}\n"})
    assert system.usable_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3), ("250000", 3)])
def test_cores_of_version_1(write, quota: str, cores: int) -> None:
    group = "sys/fs/cgroup/cpu/"  # in a container that of the host's path is the root
    write({"proc/self/cgroup": "4:cpu,cpuacct:/docker/a\n3:memory:/docker/a\n0::/\n"})
    write({f"{group}cpu.cfs_quota_us": f"{quota}\n", f"{group}cpu.cfs_period_us": "100000\n"})
    assert system.usable_cores() == cores


def test_memory_of_version_2_is_that_of_the_tightest_group_above(write) -> None:
    group = "sys/fs/cgroup/"
    write({"proc/self/cgroup": "0::/pod/container\n"})
    write(
        {
            f"{group}pod/container/memory.max": "max\n",
            f"{group}pod/container/memory.current": "70\n",
        }
    )
    assert system.available_memory() == 8_192_000_000
    write({f"{group}pod/memory.max": "4000\n", f"{group}pod/memory.current": "1000\n"})
    assert system.available_memory() == 3000
    write({f"{group}pod/memory.stat": "anon 1\ninactive_file 600\nactive_file 5\n"})
    assert system.available_memory() == 3600
    write({f"{group}pod/memory.current": "9000\n"})
    assert system.available_memory() == 0


def test_memory_of_version_1(write) -> None:
    group = "sys/fs/cgroup/memory/a/"
    write({"proc/self/cgroup": "4:cpu:/\n3:memory:/a\n"})
    write(
        {
            f"{group}memory.limit_in_bytes": "9223372036854771712\n",
            f"{group}memory.usage_in_bytes": "500\n",
        }
    )
    assert system.available_memory() == 8_192_000_000
    write({f"{group}memory.limit_in_bytes": "4000\n"})
    write({f"{group}memory.stat": "inactive_file 7\ntotal_inactive_file 20\n"})
    assert system.available_memory() == 3520


def test_this_machine_has_both() -> None:
    assert (
        1 <= system.usable_cores() <= (os.cpu_count() or 1) and (system.available_memory() or 1) > 0
    )


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(None, 8), ("1", 8), ("3", 2), ("8", 1), ("64", 1), ("0", 8), ("x", 8), ("", 8)],
)
def test_the_ranks_of_a_machine_share_its_cores(
    ranks: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "usable_cores", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert system.cores_per_rank() == expected


@pytest.mark.parametrize(
    ("counts", "needed"),
    [({}, 64), ({"num_ranks": 2}, 72), ({"num_workers": 2}, 120), ({"num_workers": 4}, 144)],
)
def test_too_few_open_files_are_one_error_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, counts: dict[str, int], needed: int
) -> None:
    for limit in (needed, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        require_open_files(**counts)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (needed - 1, needed))
    with pytest.raises(
        EnvironmentFault, match=f"may open {needed - 1} files: it needs {needed}, .*ulimit -n"
    ):
        require_open_files(**counts)


@pytest.mark.parametrize("launcher", [[], ["--nproc-per-node", "2"]], ids=["alone", "launcher"])
def test_a_run_checks_its_open_files_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    launcher: list[str],
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (28, 28))
    line = [
        "train",
        *launcher,
        "+config=tiny",
        "--mock-data",
        "--vocab-size",
        "64",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    assert cli.main(line) == 2
    assert (
        "a process may open 28 files" in capsys.readouterr().err and not (tmp_path / "run").exists()
    )


# Page faults of the second of two equal rounds of large blocks; every fault clears one page of 4
# KiB.
SECOND_ROUND = """
import ctypes, resource
from nanotrain.system import keep_freed_memory
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page would be one fault
keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for megabytes in (1, 40, 8, 60):
        bytearray(b"x" * (megabytes * 2**20))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
@pytest.mark.parametrize(
    ("environment", "pages"),
    [({}, range(1000)), ({"MALLOC_MMAP_THRESHOLD_": "131072"}, range(10_000, 10**6))],
)
def test_freed_memory_is_kept_unless_the_environment_sets_the_allocator(environment, pages) -> None:
    program = [sys.executable, "-c", SECOND_ROUND]
    faults = int(
        subprocess.run(program, env=environment, capture_output=True, text=True, check=True).stdout
    )
    assert faults in pages  # 218 MB are 55,808 pages


def test_the_version_of_a_package_is_that_of_its_metadata() -> None:
    assert package_version("torch") == version("torch")
    assert package_version("no-such-package") is None
