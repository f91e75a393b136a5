"""What --replay-interval and --memory-checkpoint-interval cost a run on two ranks of this machine.

    python benchmarks/replay_cost.py
    python benchmarks/replay_cost.py --steps 60 --microbatches 1 4 16

Every second step of a run is compared with the other replica, so that both kinds of steps have the
same neighbours; the cost of an interval of 100 is a hundredth of the difference of their medians.
The second table saves every second step in memory instead.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

INTERVAL = 100
RANKS = 2
WARMUP = 4  # steps that are not counted
MODEL = """--mock-data --vocab-size 2048 --num-layers 4 --hidden-size 128 --num-attention-heads 4
    --seq-length 128 --micro-batch-size 4 --eval-interval 0 --save-interval 0 --generate-tokens 0
    --no-report --num-workers 0 --log-interval 1"""
FLAGS = {"replay": "--replay-interval 2", "memory": "--memory-checkpoint-interval 2"}


def step_times(kind: str, *, microbatches: int, steps: int, folder: Path) -> list[float]:
    """Seconds of the steps of a run, by number from 1."""
    words = MODEL.split()
    words += FLAGS[kind].split()
    words += ["--global-batch-size", str(4 * RANKS * microbatches), "--train-iters", str(steps)]
    words += ["--run-dir", str(folder / f"{kind}-{microbatches}")]
    command = [sys.executable, "-m", "nanotrain", "train", "--nproc-per-node", str(RANKS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *words], check=True, capture_output=True, env=environment)
    rows = (folder / f"{kind}-{microbatches}" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["step_time_s"] for row in rows]


def cost_row(kind: str, *, microbatches: int, steps: int, folder: Path) -> str:
    """A row of the table: both medians and the cost at an interval of 100."""
    times = step_times(kind, microbatches=microbatches, steps=steps, folder=folder)
    plain = statistics.median(times[WARMUP::2])
    other = statistics.median(times[WARMUP + 1 :: 2])
    extra = (other - plain) / plain
    cost = extra / INTERVAL
    return f"| {kind} | {microbatches} | {plain:.3f} | {other:.3f} | {extra:.2f} | {cost:.2%} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=44, help="steps of each run")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    print("| | microbatches | plain step, s | with it, s | extra steps | at an interval of 100 |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for kind in FLAGS:
            for microbatches in options.microbatches:
                row = cost_row(
                    kind, microbatches=microbatches, steps=options.steps, folder=Path(folder)
                )
                print(row, flush=True)


if __name__ == "__main__":
    main()
