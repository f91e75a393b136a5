"""CPU time of the commands before they do their work, beside `import torch`, and the time they take
to end.

    python benchmarks/startup.py
    python benchmarks/startup.py --rounds 7 --write benchmarks/results/startup.md

Every measurement is a process with its children. The model's own work (building it, reading its
weights, validation before the first step) is measured apart, around the functions that do it; they
import nothing (tests/test_system.py). A command is compared with `import torch` plus that work,
once without and once with the end of the process that imports torch, which takes a quarter of its
time; times of commands that end inside a process exclude its end. The last rows are the wall-clock
time between the last line printed and the end of the process.
"""

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

TICKS = os.sysconf("SC_CLK_TCK")
LIMIT = 1.3  # times `import torch` plus the model's own work
MODEL = ["+config=tiny", "--train-iters=1", "--no-report"]
WHOLE = "python -c 'import torch'"
IMPORTS = {"import torch": "torch", "import nanotrain": "nanotrain"}


def session_cpu_s(session: int) -> float:
    """CPU seconds of all processes of a session, of ended ones as far as they were waited for."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += sum(map(int, fields[11:15]))
    return total / TICKS


class FirstWork(BaseException):
    """The command has come to its first step or token."""


def work_of(kind: str) -> tuple[list[tuple[Any, str]], tuple[Any, str]]:
    """The functions that are the model's own work, and the one that ends the measurement, as
    (owner, name).
    """
    if kind == "generate":
        import nanotrain.inference.checkpoint as opened
        import nanotrain.inference.generate as tokens

        return [(opened, "load_stage")], (tokens.Generation, "step")
    import nanotrain.train.fit as fit
    import nanotrain.train.open_run as opened
    from nanotrain.train.evaluate import EvaluateHook

    return [(opened, "build_run"), (EvaluateHook, "before_training")], (fit, "train_step")


def probe(kind: str, arguments: Sequence[str]) -> None:
    """Run a command up to its first step or token; print its CPU seconds, and those of the model's
    own work.
    """
    from nanotrain.cli.main import main
    from nanotrain.system import importing_torch

    with importing_torch():
        own, (owner, name) = work_of(kind)
    work_s: list[float] = []

    def stop(*_: Any, **__: Any) -> None:
        raise FirstWork

    def timed(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = function(*args, **kwargs)
            work_s.append(time.process_time() - start)
            return result

        return call

    setattr(owner, name, stop)
    for place, each in own:
        setattr(place, each, timed(getattr(place, each)))
    with (
        open(os.devnull, "w") as silent,
        redirect_stdout(silent),
        redirect_stderr(silent),
        suppress(FirstWork),
    ):
        main(list(arguments))
        raise SystemExit("the command ended before its first step or token")
    os.write(1, f"{session_cpu_s(os.getsid(0))} {sum(work_s)}\n".encode())
    os._exit(0)


def run(command: Sequence[str]) -> tuple[str, float, float]:
    """The output of a command, its CPU seconds with its children, and the seconds between its last
    line and its end.
    """
    before = os.times()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    lines, last = [], time.perf_counter()
    for line in process.stdout:
        lines.append(line)
        last = time.perf_counter()
    if process.wait():
        raise SystemExit(f"{' '.join(command)}\n{''.join(lines)}")
    ended_s, after = time.perf_counter() - last, os.times()
    cpu_s = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return "".join(lines), cpu_s, ended_s


def measure(folder: Path, *, rounds: int) -> dict[str, list[float]]:
    """Seconds of every row, one per round; a trained model lies in `folder` afterwards."""
    python, nanotrain = [sys.executable], [sys.executable, "-m", "nanotrain"]
    here = [*python, __file__]
    trained = folder / "trained"
    lines = {
        "train": ["train", *MODEL],
        "generate": ["generate", str(trained), "--prompt", "def ", "--num-tokens=8"],
    }
    run([*nanotrain, *lines["train"], f"--run-dir={trained}"])
    rows: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        rows.setdefault(name, []).append(seconds)

    for number in range(rounds):
        for name, module in IMPORTS.items():
            code = f"import {module}, time, os; print(time.process_time(), flush=True); os._exit(0)"
            note(name, float(run([*python, "-c", code])[0]))
        note(WHOLE, run([*python, "-c", "import torch"])[1])
        note("nanotrain --help", run([*nanotrain, "--help"])[1])
        for kind, line in lines.items():
            new = [f"--run-dir={folder}/{number}"] if kind == "train" else []
            total, own = run([*here, "--probe", kind, *line, *new])[0].split()[-2:]
            note(kind, float(total))
            note(f"{kind}, own work", float(own))
            note(f"{kind}, end", run([*nanotrain, *line, *new])[2])
        command = [
            *nanotrain,
            "train",
            "--nproc-per-node=2",
            *MODEL,
            f"--run-dir={folder}/{number}-two",
        ]
        note("two ranks", run(command)[1])
    return rows


def table(rows: dict[str, list[float]]) -> list[str]:
    """The rows as Markdown: medians, and the ratio to `import torch` plus the model's own work."""
    middle = {name: statistics.median(values) for name, values in rows.items()}

    def against(kind: str) -> str:
        work = [rows["import torch"], rows[WHOLE], rows[f"{kind}, own work"], rows[kind]]
        ratio = statistics.median(
            total / (torch + own) for torch, _, own, total in zip(*work, strict=True)
        )
        whole = statistics.median(
            total / (torch + own) for _, torch, own, total in zip(*work, strict=True)
        )
        return f"{ratio:.2f}x; {whole:.2f}x of the whole process; limit {LIMIT}x"

    lines = ["| what | seconds | beside `import torch` plus its own work |", "|---|---|---|"]
    lines += [
        f"| CPU, `{name}` | {middle[name]:.2f} | |"
        for name in (*IMPORTS, WHOLE, "nanotrain --help")
    ]
    for kind, what in (
        ("train", "a 1-step run before its step"),
        ("generate", "`generate` before its first token"),
    ):
        lines.append(f"| CPU, {what} | {middle[kind]:.2f} | {against(kind)} |")
        lines.append(f"| CPU, the model's own work in it | {middle[f'{kind}, own work']:.2f} | |")
    lines.append(
        f"| CPU, a whole 1-step run on two ranks, launcher and report of them | {middle['two ranks']:.2f} | |"
    )
    lines += [
        f"| clock, end of `{kind}` after its last line | {middle[f'{kind}, end']:.2f} | |"
        for kind in ("train", "generate")
    ]
    return lines


def main() -> None:
    if sys.argv[1:2] == ["--probe"]:
        probe(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--write", type=Path, default=None, help="also write the table to this file"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), rounds=options.rounds)
    about = f"{datetime.date.today()}, {os.cpu_count()}-core CPU shared with other work"
    lines = [
        f"{about}, Python {platform.python_version()}; median of {options.rounds} rounds, one thread per process.",
        "",
        *table(rows),
    ]
    print("\n".join(lines))
    if options.write:
        options.write.write_text("# Start and end of a command\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
