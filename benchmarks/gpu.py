"""Compare nanotrain with a plain PyTorch loop on one GPU: a llama1b-shaped model, bf16, with and without torch.compile.

    python benchmarks/gpu.py [--rounds 3]

Tokens per second, model FLOPs utilization (MFU) and peak memory. Both sides run in turn, each launch in a new process,
as in throughput.py. Without a GPU it prints a message and exits.
"""

import argparse
import statistics
import sys

import torch
from baselines import Shape
from model import model_config
from throughput import Contender, Job, Outcome, launch, nanotrain_command, torch_command

from nanotrain.topology.counts import flops_per_token
from nanotrain.topology.hardware import peak_flops
from nanotrain.topology.shape import ModelShape

CONTENDERS = (
    Contender("torch", 1, torch_command("single")),
    Contender("nanotrain", 1, nanotrain_command(), ("torch",)),
    Contender("torch, compiled", 1, torch_command("single", "--compile")),
    Contender("nanotrain, compiled", 1, nanotrain_command("--torch-compile"), ("torch, compiled",)),
)


def model_flops(shape: Shape) -> int:
    """Floating-point operations per token, forward and backward, by the convention of nanotrain's log."""
    return flops_per_token(ModelShape.of(model_config(shape)), shape.seq)


def table(outcomes: dict[str, list[Outcome]], job: Job, peak: float | None) -> str:
    """The Markdown table of medians over rounds."""
    lines = ["| contender | tokens/s | ratio | MFU | peak memory |", "|---|---:|---:|---:|---:|"]
    for contender in CONTENDERS:
        mine = outcomes[contender.name]
        speed = statistics.median(outcome.tokens_per_second for outcome in mine)
        rival = outcomes[contender.rivals[0]] if contender.rivals else []
        ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(mine, rival, strict=False)]
        ratio = f"{statistics.median(ratios):.2f}x" if ratios else ""
        mfu = f"{speed * model_flops(job.shape) / peak:.1%}" if peak else "unknown"
        memory = max(outcome.peak_memory_bytes for outcome in mine) / 2**30
        lines.append(f"| {contender.name} | {speed:,.0f} | {ratio} | {mfu} | {memory:.1f} GiB |")
    return "\n".join(lines)


def main() -> None:
    """Run the contenders in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return
    device = torch.cuda.get_device_name()
    job = Job("llama1b", "bf16", args.warmup, args.steps, device="cuda")
    outcomes: dict[str, list[Outcome]] = {contender.name: [] for contender in CONTENDERS}
    for number in range(1, args.rounds + 1):
        for contender in CONTENDERS:
            outcomes[contender.name].extend(launch([contender], job))
            speed = outcomes[contender.name][-1].tokens_per_second
            print(f"round {number}  {contender.name:20} {speed:10,.0f} tokens/s", file=sys.stderr, flush=True)
    print(f"\nllama1b shape, bf16, {device}, torch {torch.__version__}, median of {args.rounds} rounds\n")
    print(table(outcomes, job, peak_flops(device, "bf16")))


if __name__ == "__main__":
    main()
