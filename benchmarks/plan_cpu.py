"""Step times that `nanotrain plan --gpu cpu` predicts beside measured ones: twelve layouts of the
10m and 25m shapes.

    python benchmarks/plan_cpu.py --folder runs/plan_cpu --rounds 2    # 10 minutes on 2 cores
    python benchmarks/plan_cpu.py --folder runs/plan_cpu --rounds 0    # predict again what was measured

Every layout is a run as users start it, one core per rank; rounds interleave the layouts, and every
other round is in reverse. A measured time is the median step of the quietest round: other programs
on the machine only add to it. The prediction is calibrated on one layout, or on several, which are
marked. `--clock cpu` compares the CPU time of a rank, which waiting for other ranks and programs is
not part of.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import median

from throughput import Job, finished, nanotrain_command

from nanotrain.config.load import load
from nanotrain.planner.calibrate import Measured, calibrate, calibrated
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.scenario import scenario_of
from nanotrain.planner.step_time import StepClock, StepTime

STEPS = {"10m": 5, "25m": 3}
STRATEGY = "--data-parallel-sharding-strategy="
# name: shape, processes, dtype, samples per microbatch, flags; 4 samples per data-parallel rank and
# step
LAYOUTS = {
    "one process, microbatch 4": ("10m", 1, "fp32", 4, ()),
    "one process, microbatch 1": ("10m", 1, "fp32", 1, ("--global-batch-size=4",)),
    "recompute full": ("10m", 1, "fp32", 4, ("--recompute-granularity=full",)),
    "bf16, microbatch 2": ("10m", 1, "bf16", 2, ("--global-batch-size=4",)),
    "no_shard": ("10m", 2, "fp32", 4, (f"{STRATEGY}no_shard", "--overlap-grad-reduce")),
    "optim_grads": ("10m", 2, "fp32", 4, (f"{STRATEGY}optim_grads", "--overlap-grad-reduce")),
    "optim_grads_params": ("10m", 2, "fp32", 4, (f"{STRATEGY}optim_grads_params",)),
    "tp 2": ("10m", 2, "fp32", 4, ("--tensor-model-parallel-size=2",)),
    "pp 2, microbatch 1": (
        "10m",
        2,
        "fp32",
        1,
        ("--pipeline-model-parallel-size=2", "--global-batch-size=4"),
    ),
    "cp 2": ("10m", 2, "fp32", 4, ("--context-parallel-size=2",)),
    "25m, microbatch 2": ("25m", 1, "fp32", 2, ()),
    "25m, optim, microbatch 2": (
        "25m",
        2,
        "fp32",
        2,
        (f"{STRATEGY}optim", "--overlap-grad-reduce"),
    ),
}
SKIPPED = 2  # steps of every run


def arguments(name: str, folder: Path) -> list[str]:
    """The command line of a layout."""
    model, _, dtype, micro_batch, flags = LAYOUTS[name]
    job = Job(model, dtype, warmup=SKIPPED, steps=STEPS[model])
    return nanotrain_command(*flags, micro_batch=micro_batch)(job, folder)


def train(name: str, folder: Path) -> None:
    """Run one layout, one core per rank; its report has the clock and the CPU time of all ranks per
    step.
    """
    environment = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={LAYOUTS[name][1]}",
    ]
    output = finished(
        [sys.executable, *launcher, *arguments(name, folder)],
        environment,
        names=name,
        timeout_s=None,
    )
    (folder / "report.json").write_text(
        next(line for line in output.splitlines() if line.startswith("{"))
    )


def quietest(root: Path, name: str, *, clock: str) -> Measured | None:
    """The run of a layout with the shortest median step; None without one."""
    processes, seconds = LAYOUTS[name][1], []
    for file in root.glob(f"*/{[*LAYOUTS].index(name)}/report.json"):
        report = json.loads(file.read_text())
        ranks = 1 if clock == "wall" else processes
        seconds.append(
            median(report["step_time_s" if clock == "wall" else "cpu_time_s"][SKIPPED:]) / ranks
        )
    if not seconds:
        return None
    config = load(arguments(name, root)[1:]).config
    return Measured(scenario_of(config, processes, gpu=gpu_of("cpu")), min(seconds))


def table(runs: dict[str, Measured], chosen: list[str], *, clock: str) -> str:
    """Measured and predicted step times of all layouts."""
    calibration = calibrate([runs[name] for name in chosen])
    lines = ["| layout | measured s | predicted s | error |", "|---|---:|---:|---:|"]
    errors = []
    for name, run in runs.items():
        clock_of_run = StepClock(calibrated(run.scenario, calibration))
        time = clock_of_run.step_time()
        predicted = time.total if clock == "wall" else cpu_seconds(clock_of_run, time)
        error = predicted / run.step_s - 1
        errors += [] if name in chosen else [abs(error)]
        mark = " (calibrated on)" if name in chosen else ""
        lines.append(f"| {name}{mark} | {run.step_s:.3f} | {predicted:.3f} | {error:+.1%} |")
    lines.append(
        f"\n{calibration}\nmedian error {median(errors):.1%}, largest {max(errors):.1%} of {len(errors)}"
    )
    return "\n".join(lines)


def cpu_seconds(clock: StepClock, time: StepTime) -> float:
    """Seconds in which a rank does not wait for another, the mean over the pipeline ranks, as it is
    measured.
    """
    number, ranks = clock.shape.num_microbatches, range(clock.shape.num_ranks)
    busy = [
        number * sum(clock.durations[action] for action in clock.actions(rank)) for rank in ranks
    ]
    return time.total - time.bubble + sum(busy) / len(busy) - busy[time.pp_rank]


def main() -> None:
    """Train, predict, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--calibrate", choices=LAYOUTS, nargs="+", default=["no_shard"])
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    args = parser.parse_args()
    before = len([*args.folder.glob("*")]) if args.folder.exists() else 0
    for number in range(before, before + args.rounds):
        for name in LAYOUTS if number % 2 == 0 else reversed(LAYOUTS):
            train(name, args.folder / str(number) / str([*LAYOUTS].index(name)))
            print(f"round {number}  {name}", file=sys.stderr, flush=True)
    runs = {name: run for name in LAYOUTS if (run := quietest(args.folder, name, clock=args.clock))}
    print(table(runs, args.calibrate, clock=args.clock))


if __name__ == "__main__":
    main()
