"""Tokens per second of nanotrain beside plain PyTorch: the same model, the same machine, in turn.

    python benchmarks/throughput.py                             # 25m, fp32 and bf16
    python benchmarks/throughput.py --model 110m --dtype bf16 --rounds 5

Every contender is a new launch of two processes with half of the cores each (the single ones: one
process, all cores). Contenders run in turn, for several rounds. The ratio of a round compares runs
that are close in time, and the table shows the median over rounds, so a slow minute of the machine
affects both sides. It also shows the CPU time of a step, which other programs disturb less.
nanotrain runs as users run it: its command line, data workers and log (rank.py adds the clocks).
Start-up and warmup steps are excluded on both sides.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baselines import SHAPES, Shape

HERE = Path(__file__).resolve().parent
SHOWN_LINES = 30  # of the output of a launch that failed


@dataclass(frozen=True)
class Job:
    """The workload that all contenders of a run share."""

    model: str
    dtype: str
    warmup: int
    steps: int
    device: str = "cpu"
    num_microbatches: int = 1  # per step; above 1 on one process alone

    @property
    def shape(self) -> Shape:
        """Sizes of the model and of one rank's microbatch."""
        return SHAPES[self.model]


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        name: name in the table.
        num_processes: number of ranks.
        command: function from (job, output folder) to the arguments after `torchrun`.
        rivals: contenders that it is compared with; the fastest one of each round counts.
        environment: additional environment variables of its processes.
    """

    name: str
    num_processes: int
    command: Callable[[Job, Path], list[str]]
    rivals: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def torch_command(strategy: str, *extra: str) -> Callable[[Job, Path], list[str]]:
    """The command of a plain-PyTorch contender."""

    def command(job: Job, folder: Path) -> list[str]:
        options = {
            "strategy": strategy,
            "model": job.model,
            "dtype": job.dtype,
            "device": job.device,
            "warmup": job.warmup,
            "steps": job.steps,
            "num-microbatches": job.num_microbatches,
        }
        return [
            str(HERE / "baselines.py"),
            *(f"--{name}={value}" for name, value in options.items()),
            *extra,
        ]

    return command


def nanotrain_command(
    *flags: str, micro_batch: int | None = None, benchmarks: Path = HERE
) -> Callable[[Job, Path], list[str]]:
    """The command of a nanotrain contender: the sizes of the job as flags.

    Args:
        flags: additional flags.
        micro_batch: samples per microbatch; None for the job's.
        benchmarks: folder of the rank.py to run.
    """

    def command(job: Job, folder: Path) -> list[str]:
        options = {
            "num-layers": job.shape.layers,
            "hidden-size": job.shape.hidden,
            "ffn-hidden-size": job.shape.ffn,
            "num-attention-heads": job.shape.heads,
            "num-query-groups": job.shape.kv_heads,
            "vocab-size": job.shape.vocab,
            "max-position-embeddings": job.shape.seq,
            "seq-length": job.shape.seq,
            "micro-batch-size": micro_batch or job.shape.micro_batch,
            "train-iters": job.warmup + job.steps,
            "eval-interval": 0,
            "params-dtype": job.dtype,
            "device": job.device,
            "run-dir": folder,
        }
        if job.num_microbatches > 1:
            options["global-batch-size"] = options["micro-batch-size"] * job.num_microbatches
        tie = (
            "--no-untie-embeddings-and-output-weights"
            if job.shape.tied
            else "--untie-embeddings-and-output-weights"
        )
        switches = ["--mock-data", tie, "--no-save", "--no-report"]
        return [
            str(benchmarks / "rank.py"),
            *(f"--{name}={value}" for name, value in options.items()),
            *switches,
            *flags,
        ]

    return command


def sharding(
    strategy: str, *flags: str, benchmarks: Path = HERE
) -> Callable[[Job, Path], list[str]]:
    """nanotrain with a sharding strategy and overlapped gradient reduction, as DDP and FSDP2."""
    flags = (f"--data-parallel-sharding-strategy={strategy}", "--overlap-grad-reduce", *flags)
    return nanotrain_command(*flags, benchmarks=benchmarks)


ZERO_RIVALS = ("torch DDP + ZeroRedundancyOptimizer", "torch FSDP2")
CONTENDERS = (
    Contender("torch, one process", 1, torch_command("single")),
    Contender("nanotrain, one process", 1, nanotrain_command(), ("torch, one process",)),
    Contender(
        "torch, one process, checkpoint of every block", 1, torch_command("single", "--checkpoint")
    ),
    Contender(
        "nanotrain, one process, recompute full",
        1,
        nanotrain_command("--recompute-granularity=full"),
        ("torch, one process, checkpoint of every block",),
    ),
    Contender("torch DDP", 2, torch_command("ddp")),
    Contender("nanotrain no_shard", 2, sharding("no_shard"), ("torch DDP",)),
    Contender("torch DDP + ZeroRedundancyOptimizer", 2, torch_command("zero1")),
    Contender("nanotrain optim", 2, sharding("optim"), ZERO_RIVALS),
    Contender("torch FSDP2", 2, torch_command("fsdp2")),
    Contender("nanotrain optim_grads", 2, sharding("optim_grads"), ZERO_RIVALS),
    Contender("nanotrain optim_grads_params", 2, sharding("optim_grads_params"), ("torch FSDP2",)),
    Contender(
        "nanotrain optim_grads_params, overlap",
        2,
        sharding("optim_grads_params", "--overlap-param-gather"),
        ("torch FSDP2",),
    ),
    Contender(
        "nanotrain optim_grads_params, overlap, double buffer",
        2,
        sharding("optim_grads_params", "--overlap-param-gather", "--fsdp-double-buffer"),
        ("torch FSDP2",),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """The measurements of one launch of a contender.

    Attributes: tokens_per_second: tokens per second of the median step. tokens_per_cpu_second:
        tokens of the median step per second of CPU time, summed over all ranks. peak_memory_bytes:
        peak memory of rank 0. sent: bytes per step and rank, by group; nanotrain only.
    """

    tokens_per_second: float
    tokens_per_cpu_second: float
    peak_memory_bytes: int
    sent: dict[str, float]

    @classmethod
    def of(cls, report: dict[str, Any], job: Job) -> "Outcome":
        """Parse the report that rank 0 printed."""
        return cls(
            tokens_per_second=report["tokens_per_step"]
            / statistics.median(report["step_time_s"][-job.steps :]),
            tokens_per_cpu_second=report["tokens_per_step"]
            / statistics.median(report["cpu_time_s"][-job.steps :]),
            peak_memory_bytes=report["peak_memory_bytes"],
            sent=report.get("sent", {}),
        )


def launch(
    contenders: list[Contender], job: Job, *, timeout_s: float | None = None
) -> list[Outcome]:
    """Run contenders once, one after the other; if several, all of nanotrain and on equally many
    processes.

    Raises:
        SystemExit: they failed, or had not ended after `timeout_s`.
    """
    first = contenders[0]
    threads = max(1, len(os.sched_getaffinity(0)) // first.num_processes)
    environment = (
        dict(os.environ, OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE")
        | first.environment
    )
    with tempfile.TemporaryDirectory() as folder:
        script, *arguments = first.command(job, Path(folder) / "0")
        for number, contender in enumerate(contenders[1:], start=1):
            arguments += ["--then", *contender.command(job, Path(folder) / str(number))[1:]]
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={first.num_processes}",
        ]
        command = [sys.executable, *launcher, script, *arguments]
        output = finished(
            command, environment, names=", ".join(c.name for c in contenders), timeout_s=timeout_s
        )
    reports = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(reports) == len(contenders), "every run prints one report"
    return [Outcome.of(report, job) for report in reports]


def finished(
    command: list[str], environment: dict[str, str], *, names: str, timeout_s: float | None
) -> str:
    """The output of a command; torchrun ends its ranks when it is terminated, which killing it
    would not.

    Raises:
        SystemExit: it failed, with the end of what it printed, or had not ended after `timeout_s`.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
            reason = "failed"
        except subprocess.TimeoutExpired:
            process.terminate()
            output, errors = process.communicate()
            reason = f"had not ended after {timeout_s:.0f} s"
    if process.returncode:
        last = "\n".join([*output.splitlines()[-SHOWN_LINES:], *errors.splitlines()[-SHOWN_LINES:]])
        raise SystemExit(f"{names} {reason}:\n{last}")
    return output


def run(job: Job, launches: list[list[Contender]], rounds: int) -> dict[str, list[Outcome]]:
    """Run all launches in turn for several rounds; outcomes of every round by name of the
    contender.
    """
    measured: dict[str, list[Outcome]] = {
        contender.name: [] for together in launches for contender in together
    }
    for number in range(1, rounds + 1):
        # Every other round runs in reverse order, so that no contender always runs last.
        forwards = number % 2 == 1
        for together in launches if forwards else reversed(launches):
            contenders = together if forwards else together[::-1]
            for contender, outcome in zip(contenders, launch(contenders, job), strict=True):
                measured[contender.name].append(outcome)
                speed = f"{outcome.tokens_per_second:10,.0f} tokens/s"
                print(f"round {number}  {contender.name:52} {speed}", file=sys.stderr, flush=True)
    return measured


@dataclass(frozen=True)
class Figure:
    """Medians over the rounds: a contender's speed, and its ratio to the fastest rival of each
    round.
    """

    speed: float
    ratio: float | None

    @classmethod
    def of(cls, attribute: str, mine: list[Outcome], rivals: list[list[Outcome]]) -> "Figure":
        """The figure of an attribute of `Outcome`; the ratio is None without rivals."""
        speeds = [getattr(outcome, attribute) for outcome in mine]
        best = [
            max(getattr(outcome, attribute) for outcome in round_)
            for round_ in zip(*rivals, strict=True)
        ]
        ratios = [speed / rival for speed, rival in zip(speeds, best, strict=bool(rivals))]
        return cls(statistics.median(speeds), statistics.median(ratios) if ratios else None)

    def cells(self) -> list[str]:
        """Speed and ratio as text."""
        return [f"{self.speed:,.0f}", "" if self.ratio is None else f"{self.ratio:.2f}x"]


def table(contenders: list[Contender], measured: dict[str, list[Outcome]]) -> str:
    """The Markdown table of medians over rounds: speed, and ratio to the fastest rival of each
    round.
    """
    heads = ("contender", "tokens/s", "ratio", "tokens per CPU second", "ratio", "to the faster of")
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * 4 + "---|"]
    for contender in contenders:
        rivals = [measured[rival] for rival in contender.rivals if rival in measured]
        cells = [contender.name]
        for attribute in ("tokens_per_second", "tokens_per_cpu_second"):
            cells += Figure.of(attribute, measured[contender.name], rivals).cells()
        lines.append("| " + " | ".join([*cells, ", ".join(contender.rivals)]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the contenders and print a table per dtype."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("smoke", "10m", "25m", "110m"), default="25m")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--only", default="", help="run contenders whose name contains this, and their rivals"
    )
    args = parser.parse_args()

    chosen = {c.name for c in CONTENDERS if args.only in c.name}
    chosen |= {rival for c in CONTENDERS if c.name in chosen for rival in c.rivals}
    contenders = [c for c in CONTENDERS if c.name in chosen]
    cores = len(os.sched_getaffinity(0))
    for dtype in args.dtype:
        job = Job(args.model, dtype, args.warmup, args.steps)
        measured = run(job, [[contender] for contender in contenders], args.rounds)
        print(
            f"\n{args.model}, {dtype}, {cores} cores, median of {args.rounds} rounds of {args.steps} steps\n"
        )
        print(table(contenders, measured), flush=True)


if __name__ == "__main__":
    main()
