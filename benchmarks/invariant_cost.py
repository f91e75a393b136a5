"""What --invariant costs a step on this machine: one rank, with and without it in turns.

    python benchmarks/invariant_cost.py
    python benchmarks/invariant_cost.py --params-dtype bf16 --rounds 5 --steps 20

Each round runs both; the medians are over the steps of all rounds, those of warm-up left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WARMUP = 3  # steps of every run that are not counted
SIZES = ((128, 128), (256, 256))  # hidden size, sequence length
MODEL = """--mock-data --vocab-size 2048 --num-layers 4 --num-attention-heads 8
    --micro-batch-size 4 --global-batch-size 8 --eval-interval 0 --save-interval 0
    --generate-tokens 0 --no-report --num-workers 0 --log-interval 1"""


def step_times(words: list[str], *, steps: int, run_dir: Path) -> list[float]:
    """Seconds of the steps of a run after warm-up."""
    command = [sys.executable, "-m", "nanotrain", "train", *MODEL.split(), *words]
    command += ["--train-iters", str(WARMUP + steps), "--run-dir", str(run_dir)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["step_time_s"] for row in rows][WARMUP:]


def cost_row(hidden: int, length: int, *, options: argparse.Namespace, folder: Path) -> str:
    """A row of the table: both medians and their ratio."""
    words = ["--hidden-size", str(hidden), "--seq-length", str(length)]
    words += ["--params-dtype", options.params_dtype]
    kinds: dict[str, list[str]] = {"plain": [], "invariant": ["--invariant"]}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        for kind, flags in kinds.items():
            run_dir = folder / f"{kind}-{hidden}-{number}"
            times[kind] += step_times([*words, *flags], steps=options.steps, run_dir=run_dir)
    plain, invariant = (statistics.median(values) for values in times.values())
    return f"| {hidden} | {length} | {plain:.3f} | {invariant:.3f} | {invariant / plain:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8, help="counted steps of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--params-dtype", default="fp32", choices=("fp32", "bf16"))
    options = parser.parse_args()
    print("| hidden size | sequence length | plain step, s | --invariant, s | ratio |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for hidden, length in SIZES:
            print(cost_row(hidden, length, options=options, folder=Path(folder)), flush=True)


if __name__ == "__main__":
    main()
