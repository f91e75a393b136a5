"""Slices of recipes on one GPU: predicted and measured, with the kernels of a step by class.

    python benchmarks/gpu_slices.py recipes [--minutes 9] [--out DIR]   # mixtures, scans, MLA
    python benchmarks/gpu_slices.py fp8                                 # 8 layers of Llama 3 8B
    python benchmarks/gpu_slices.py recipes --device cpu                # tiny widths: shows that they run

A slice is a recipe with few layers on one rank, trained on synthetic tokens for `STEPS` steps, the
last of them with a profile. Its row shows tokens per second beside the prediction of `nanotrain
plan` for the same flags, and the memory in use (as nvidia-smi has it) beside the planned bytes; the
kernels of the profiled step follow. A slice that fails is a row, and the others run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gpu import kernel_times
from gpu_rows import FAILED, LEFT_OUT, OK, Row, RowReport

STEPS = 15
SLICE_SECONDS = 140.0  # what a slice may take
LONGEST_KERNELS = 12  # that are printed
COMMON = (
    "--mock-data",
    "--no-save",
    "--no-report",
    "--eval-interval=0",
    "--log-interval=1",
    "--vocab-size=32000",
    "--global-batch-size=4",
    "--pipeline-model-parallel-size=1",
    "--expert-model-parallel-size=1",
    "--data-parallel-sharding-strategy=no_shard",
    f"--train-iters={STEPS}",
    "--profile",
    f"--profile-step-start={STEPS}",
    f"--profile-step-end={STEPS}",
)
EIGHT_LAYERS = ("+config=llama3_8b", "--num-layers=8", "--micro-batch-size=1")
# name -> flags of the recipes whose kernels differ most
RECIPES: dict[str, tuple[str, ...]] = {
    "qwen3_30b_a3b": ("+config=qwen3_30b_a3b", "--num-layers=6", "--micro-batch-size=2"),
    "nemotron3_nano": (
        "+config=nemotron3_nano_30b_a3b",
        "--num-layers=6",
        "--hybrid-layer-pattern=MEM*EM",
        "--micro-batch-size=1",
        "--lr-wsd-decay-iters=1",
    ),
    "qwen3_next": (
        "+config=qwen3_next_80b_a3b",
        "--num-layers=4",
        "--num-experts=128",
        "--micro-batch-size=2",
    ),
    "deepseek_v3": (
        "+config=deepseek_v3",
        "--num-layers=4",
        "--moe-layer-freq=[0]*1+[1]*3",
        "--num-experts=32",
        "--micro-batch-size=1",
    ),
}
FP8: dict[str, tuple[str, ...]] = {
    "llama3_8b bf16": EIGHT_LAYERS,
    "llama3_8b tensorwise": (*EIGHT_LAYERS, "--fp8-format=hybrid", "--fp8-recipe=tensorwise"),
    "llama3_8b delayed": (*EIGHT_LAYERS, "--fp8-format=hybrid", "--fp8-recipe=delayed"),
    "llama3_8b blockwise": (*EIGHT_LAYERS, "--fp8-format=e4m3", "--fp8-recipe=blockwise"),
    "llama3_8b mxfp8": (*EIGHT_LAYERS, "--fp8-format=e4m3", "--fp8-recipe=mxfp8"),
}
SLICES = {"recipes": RECIPES, "fp8": FP8}
# sizes with which slices run on a CPU
TINY = (
    "--device=cpu",
    "--seq-length=64",
    "--max-position-embeddings=64",
    "--hidden-size=64",
    "--ffn-hidden-size=64",
    "--num-attention-heads=4",
)
TINY_EXPERTS = ("--num-experts=8", "--moe-router-topk=2", "--moe-ffn-hidden-size=32")
TINY_SIZES = {
    "qwen3_30b_a3b": (*TINY, *TINY_EXPERTS, "--num-query-groups=2"),
    "nemotron3_nano": (*TINY, *TINY_EXPERTS, "--num-query-groups=2", "--mamba-num-heads=8"),
    "qwen3_next": (*TINY, *TINY_EXPERTS, "--num-query-groups=2"),
    "deepseek_v3": (*TINY, *TINY_EXPERTS, "--moe-router-num-groups=4", "--moe-router-group-topk=2"),
}


def tiny_sizes(name: str) -> tuple[str, ...]:
    """The flags that shrink a slice for a CPU."""
    return TINY_SIZES.get(name, (*TINY, "--num-query-groups=2"))


@dataclass(frozen=True)
class Prediction:
    """What `nanotrain plan` says of a slice."""

    tokens_per_second: float
    memory_bytes: float


def plan_slice(flags: Sequence[str], gpu: str) -> Prediction:
    """Predict a slice on one GPU.

    Raises:
        RuntimeError: the plan refuses the flags.
    """
    command = [
        sys.executable,
        "-m",
        "nanotrain",
        "plan",
        "--world-size=1",
        f"--gpu={gpu}",
        "--json",
    ]
    result = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    start = result.stdout.find("{")
    if start < 0:
        raise RuntimeError(result.stderr.strip().splitlines()[-1])
    facts = json.loads(result.stdout[start:])
    return Prediction(facts["tokens_per_s_per_gpu"], facts["memory_bytes"]["total"])


class MemoryInUse:
    """The most memory in use on GPU 0 while a block runs, by nvidia-smi every second."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryInUse":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        command = [
            "nvidia-smi",
            "--id=0",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
        ]
        while not self._ended.wait(1.0):
            try:
                printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError):
                return  # without nvidia-smi the row has no such number
            self.most_bytes = max(self.most_bytes, int(printed.split()[0]) * 2**20)


def measured_figures(folder: Path) -> str:
    """Tokens per second and MFU of a run: medians without the first third and the profiled step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steady = rows[len(rows) // 3 : -1]
    speed = statistics.median(row["tokens_per_second"] for row in steady)
    figures = f"{speed:,.0f} tokens/s, loss {rows[-1]['loss']:.3f}"
    shares = [row["mfu"] for row in steady if row["mfu"] is not None]
    if shares:
        figures += f", MFU {statistics.median(shares):.1%}"
    return figures


def kernel_lines(folder: Path, category: str) -> list[str]:
    """The kernels of the profiled step: milliseconds by class, then the longest."""
    (trace,) = folder.rglob("profile/*.json")
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == category]
    classes = kernel_times(events, category=category)
    by_class = ", ".join(f"{name} {time_ms:.1f}" for name, time_ms in classes.most_common())
    lines = [f"    {len(kernels)} kernels, ms by class: {by_class}"]
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in kernels:
        name = event["name"][:80]
        times[name] += event["dur"] / 1e3
        launches[name] += 1
    for name, time_ms in times.most_common(LONGEST_KERNELS):
        lines.append(f"    {time_ms:9.2f} ms {launches[name]:6} x {name}")
    return lines


def run_slice(name: str, flags: Sequence[str], *, gpu: str | None, timeout_s: float) -> Row:
    """Predict and train a slice, and print its kernels; a failure is a row.

    Args:
        name: name of the row.
        flags: its command line.
        gpu: name of the card for the planner; None on a CPU, where nothing is predicted.
        timeout_s: what the training may take.
    """
    figures: list[str] = []
    if gpu is not None:
        try:
            expected = plan_slice(flags, gpu)
            figures.append(f"predicted {expected.tokens_per_second:,.0f} tokens/s")
            figures.append(f"planned {expected.memory_bytes / 1e9:.1f} GB")
        except (RuntimeError, KeyError) as error:
            figures.append(f"no prediction: {error}")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        command = [sys.executable, "-m", "nanotrain.train", *flags, f"--run-dir={folder}"]
        try:
            with MemoryInUse() as memory:
                subprocess.run(
                    command, capture_output=True, text=True, check=True, timeout=timeout_s
                )
        except subprocess.TimeoutExpired:
            return Row(name, FAILED, f"had not ended after {timeout_s:.0f} s")
        except subprocess.CalledProcessError as error:
            last = (error.stderr or error.stdout).strip().splitlines()[-1]
            return Row(name, FAILED, f"code {error.returncode}: {last[:200]}")
        if memory.most_bytes:
            figures.append(f"{memory.most_bytes / 1e9:.1f} GB in use")
        category = "cpu_op" if gpu is None else "kernel"
        print("\n".join(kernel_lines(folder, category)), flush=True)
        return Row(name, OK, ", ".join([measured_figures(folder), *figures]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the slices; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=SLICES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, help="folder of the table")
    parser.add_argument("--only", nargs="+", help="names of slices")
    args = parser.parse_args(arguments)
    has_gpu = args.device == "cuda"
    if has_gpu and not torch.cuda.is_available():
        print("no GPU here: nothing to measure; --device cpu runs the slices with tiny widths")
        return 2
    gpu = torch.cuda.get_device_name() if has_gpu else None
    machine = f"{torch.cuda.get_device_name() if has_gpu else 'CPU'}, torch {torch.__version__}"
    report = RowReport(args.which, folder=args.out, machine=machine)
    end = time.monotonic() + 60 * args.minutes
    slices: dict[str, Any] = SLICES[args.which]
    for name in args.only or slices:
        flags = (*slices[name], *COMMON, *(() if has_gpu else tiny_sizes(name)))
        left = end - time.monotonic()
        if left < SLICE_SECONDS / 4:
            report.add(Row(name, LEFT_OUT, "the time was up"))
            continue
        report.add(run_slice(name, flags, gpu=gpu, timeout_s=min(left, SLICE_SECONDS)))
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
