"""Planned memory beside the growth of the resident set in whole runs, on layouts where activations
dominate.

    python benchmarks/planned_memory.py
    python benchmarks/planned_memory.py --only "tp 2"

Every layout is a run of `python -m nanotrain.train`, two steps on synthetic data. At its end a run
prints its plan beside the peak of its worst rank, less the process before the model. Freed blocks
of 128 KiB or more return to the system (MALLOC_MMAP_THRESHOLD_), so that this is the memory in use.

Exits with 1 if planned / measured is more than 10 % from 1.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass

MAX_ERROR = 0.10
EXACT = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # glibc's first value, fixed
MODEL = (
    *(
        "--num-layers=8",
        "--hidden-size=256",
        "--ffn-hidden-size=768",
        "--num-attention-heads=8",
        "--vocab-size=8192",
    ),
    *(
        "--seq-length=512",
        "--max-position-embeddings=512",
        "--micro-batch-size=8",
        "--untie-embeddings-and-output-weights",
    ),
)
RUN = (
    "--mock-data",
    "--train-iters=2",
    "--eval-interval=0",
    "--no-save",
    "--num-workers=0",
    "--device=cpu",
)
SUMMARY = re.compile(r"planned ([\d.]+) (\w+) per rank; measured at most ([\d.]+) (\w+)")
GIGABYTES = {"bytes": 1e-9, "kB": 1e-6, "MB": 1e-3, "GB": 1.0}


@dataclass(frozen=True)
class Layout:
    """One row: a run and its ranks."""

    name: str
    num_ranks: int
    flags: tuple[str, ...] = ()

    def run(self) -> tuple[float, float]:
        """Train; planned and measured GB."""
        environment = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", **EXACT)
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={self.num_ranks}",
        ]
        with tempfile.TemporaryDirectory() as folder:
            command = [
                *launcher,
                "-m",
                "nanotrain.train",
                *MODEL,
                *RUN,
                *self.flags,
                f"--run-dir={folder}/run",
            ]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        match = SUMMARY.search(done.stdout)
        if match is None:
            raise SystemExit(f"{self.name} failed:\n{done.stdout}\n{done.stderr}")
        planned, planned_unit, measured, measured_unit = match.groups()
        return float(planned) * GIGABYTES[planned_unit], float(measured) * GIGABYTES[measured_unit]


GPT2 = (
    "--position-embedding-type=learned_absolute",
    "--normalization=LayerNorm",
    "--activation=gelu",
    "--add-bias-linear",
)
TP = "--tensor-model-parallel-size=2"
LAYOUTS = (
    Layout("1 rank, fp32", 1),
    Layout("1 rank, bf16", 1, ("--bf16",)),
    Layout("GPT-2 options, fp32", 1, GPT2),
    Layout("4 experts, top 2, fp32", 1, ("--num-experts=4", "--moe-router-topk=2")),
    Layout(
        "dp 2, optim_grads",
        2,
        ("--data-parallel-sharding-strategy=optim_grads", "--global-batch-size=16"),
    ),
    Layout(
        "pp 2, 4 microbatches", 2, ("--pipeline-model-parallel-size=2", "--global-batch-size=32")
    ),
    Layout("cp 2, p2p", 2, ("--context-parallel-size=2",)),
    Layout("tp 2", 2, (TP,)),
    Layout("tp 2, sequence parallel", 2, (TP, "--sequence-parallel")),
)


def compare(only: str = "") -> int:
    """Run the layouts whose name contains `only` and print the table; 1 if a ratio is too far from
    1.
    """
    print("| layout | planned | measured | ratio |\n|---|---:|---:|---:|")
    ratios = []
    for layout in LAYOUTS:
        if only in layout.name:
            planned, measured = layout.run()
            ratios.append(planned / measured)
            cells = f"{planned:.2f} GB | {measured:.2f} GB | {ratios[-1]:.2f}"
            print(f"| {layout.name} | {cells} |", flush=True)
    return int(any(abs(ratio - 1) > MAX_ERROR for ratio in ratios))


def main() -> None:
    """Run the layouts one after the other and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    sys.exit(compare(parser.parse_args().only))


if __name__ == "__main__":
    main()
