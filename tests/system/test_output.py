"""Standard output that is not read any more, whose terminal has hung up, or whose disk is full."""

import fcntl
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nanotrain.system.output import guard_output, outlive_output

ROOT = Path(__file__).parents[2]


def test_a_training_goes_on_after_its_terminal_has_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    master, terminal = pty.openpty()
    with open(terminal, "w", encoding="latin-1") as stream:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, stream)
        guard_output()
        outlive_output("it goes on")
        print("a ä €")
        sys.stdout.flush()
        assert os.read(master, 100) == b"a \xe4 \\u20ac\r\n" and sys.stdout is not stream
        os.close(master)
        for name in ("stdout", "stderr", "stdout"):
            print("more", file=getattr(sys, name), flush=True)


def _run(code: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """Run Python with guarded output, through a shell's redirection."""
    code = f"from nanotrain.system.output import guard_output, outlive_output\nguard_output()\n{code}"
    command = ["bash", "-c", f'set -o pipefail; "{sys.executable}" -c "$0" {redirection}', code]
    return subprocess.run(command, check=False, capture_output=True, text=True)


LINES = "for number in range(3): print('x' * 99999, flush=True)\n"
NOTE = "outlive_output('it goes on')\n"


def test_output_that_is_needed_is_one_error_on_a_full_disk() -> None:
    code = "from nanotrain.cli.main import main\nfrom nanotrain.system.process import run_program\n"
    done = _run(f"{code}run_program(lambda: main(['--help']))", "> /dev/full")
    reason = "No space left on device; free space, or send the output elsewhere"
    assert (done.returncode, done.stderr) == (2, f"error: standard output cannot be written: {reason}\n")


@pytest.mark.parametrize(
    ("redirection", "reason"), [("> /dev/full", "No space left on device"), ("| true", "Broken pipe")]
)
def test_a_training_goes_on_without_its_output_and_says_so_once(redirection: str, reason: str) -> None:
    done = _run(f"{NOTE}{LINES}import sys; print('done', file=sys.stderr)", redirection)
    note = f"standard output cannot be written: {reason}; it goes on"
    assert (done.returncode, done.stderr.splitlines()) == (0, [note, "done"])


@pytest.mark.parametrize(("unbuffered", "printed"), [("1", ["first"]), ("", [])])
def test_what_is_printed_appears_at_once_where_python_is_unbuffered(unbuffered: str, printed: list[str]) -> None:
    code = "import os\nfrom nanotrain.system.output import guard_output\nguard_output()\nprint('first')\nos._exit(0)"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split() == printed


def test_a_pipe_that_nothing_reads_ends_other_commands_as_head_expects() -> None:
    done = _run(f"try:\n {LINES}except BrokenPipeError:\n raise SystemExit(7)", "| true")
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.parametrize("redirection", ["2> /dev/full", "2>&1 | true"])
def test_errors_that_cannot_be_printed_end_nothing(redirection: str) -> None:
    code = "import sys\nfor number in range(3): print('x' * 99999, file=sys.stderr, flush=True)"
    assert _run(code, redirection).returncode == 0


def test_a_full_pipe_that_does_not_block_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, sender = os.pipe()
    fcntl.fcntl(sender, fcntl.F_SETFL, fcntl.fcntl(sender, fcntl.F_GETFL) | os.O_NONBLOCK)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.extend(iter(lambda: os.read(receiver, 1 << 16), b"")))
    with open(sender, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        guard_output()
        threading.Timer(0.1, reader.start).start()
        print("x" * 300_000, flush=True)
    reader.join()
    assert len(b"".join(received)) == 300_001


def test_a_program_that_trains_by_a_function_goes_on_without_its_output() -> None:
    code = "import sys\nfrom nanotrain.system.output import outlive_output\noutlive_output('it goes on')\n" + LINES
    command = ["bash", "-c", f'set -o pipefail; "{sys.executable}" -c "$0" | true', code]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "standard output cannot be written: Broken pipe; it goes on\n")


@pytest.mark.parametrize("program", ["-m nanotrain.train", "examples/pretrain_gpt.py"])
def test_a_run_ends_and_saves_where_the_disk_of_its_output_is_full(tmp_path: Path, program: str) -> None:
    line = "--mock-data --vocab-size 64 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
    line += " --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 2"
    command = f'exec "{sys.executable}" {program} {line} --eval-interval 0 --no-report --run-dir "$0" > /dev/full'
    shell = ["sh", "-c", command, str(tmp_path)]
    done = subprocess.run(shell, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("No space left on device; training goes on, its steps are in metrics.jsonl") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
