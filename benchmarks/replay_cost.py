"""What `--replay-interval` costs a run on two ranks of this machine.

    python benchmarks/replay_cost.py
    python benchmarks/replay_cost.py --steps 60 --microbatches 1 4 16

Every second step of a run is compared with the other replica, and is set against the step before
it, so that both have the same neighbours. The cost of an interval of 100 is a hundredth of the
median of what such a step takes longer.
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
    --seq-length 128 --micro-batch-size 4 --eval-interval 0 --no-save --generate-tokens 0
    --no-report --num-workers 0 --log-interval 1 --replay-interval 2"""


def step_times(folder: Path, *, microbatches: int, steps: int) -> list[float]:
    """Seconds of the steps of a run, by number from 1."""
    words = MODEL.split()
    words += ["--global-batch-size", str(4 * RANKS * microbatches), "--train-iters", str(steps)]
    words += ["--run-dir", str(folder)]
    command = [sys.executable, "-m", "nanotrain", "train", "--nproc-per-node", str(RANKS), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"the run ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["step_time_s"] for row in rows]


def cost_row(times: list[float], *, microbatches: int) -> str:
    """A row of the table: both medians, and the cost at an interval of 100."""
    plain, replayed = times[WARMUP::2], times[WARMUP + 1 :: 2]
    extra = statistics.median(
        after / before - 1 for before, after in zip(plain, replayed, strict=False)
    )
    medians = f"{statistics.median(plain):.3f} | {statistics.median(replayed):.3f}"
    return f"| {microbatches} | {medians} | {extra:.2f} | {extra / INTERVAL:.2%} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24, help="steps of each run")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    if options.steps < WARMUP + 2:
        parser.error(f"--steps {options.steps}: at least {WARMUP + 2} are needed")
    print("| microbatches | plain step, s | with a replay, s | extra | at an interval of 100 |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for microbatches in options.microbatches:
            run = Path(folder) / str(microbatches)
            times = step_times(run, microbatches=microbatches, steps=options.steps)
            print(cost_row(times, microbatches=microbatches), flush=True)


if __name__ == "__main__":
    main()
