"""Compare nanotrain with plain PyTorch on one GPU: llama1b, GPT-2 124M and a mixture of four
experts, bf16.

    python benchmarks/gpu.py [--model llama1b 124m moe4] [--rounds 3]
    python benchmarks/gpu.py --rounds 1 --minutes 8  # what fits, and the commands for the rest
    python benchmarks/gpu.py --device cpu            # the same programs on a tiny model, to see that they run

Steps of 8 microbatches, as pretraining has many (`--microbatches 1`: the optimizer weighs as much
as it can), eager and with torch.compile, beside a plain loop with torch's attention and FSDP2 on
one rank: tokens per second, model FLOPs utilization (MFU) and peak memory. Contenders run in the
order of `PHASES`, each launch in a new process, as in throughput.py: first what answers most,
compiled blocks of nanotrain, a profile of one step with its kernel times by class beside the budget
of roofline.py, and the plain loop with blocks and loss compiled. Every launch prints a row at its end
and a summary after it, so that a run that is cut has printed what it measured; `--out` keeps the
rows in a file. A launch that fails is a row too, and the exit code is 1. Without a GPU it prints that and exits with code 2.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from baselines import Shape
from gpu_rows import FAILED, LEFT_OUT, OK, Row, RowReport
from model import model_config
from roofline import CARDS, budget_of
from throughput import Contender, Job, Outcome, launch, nanotrain_command, torch_command

from nanotrain.config.load import load
from nanotrain.plan.plan import plan_run
from nanotrain.spec.counts import flops_per_token, peak_flops
from nanotrain.spec.shape import ModelShape

COMPILED, COMPILED_TOO = "nanotrain, compiled", "torch, compiled, loss too"
DENSE = (
    Contender("torch", 1, torch_command("single")),
    Contender("torch FSDP2, one rank", 1, torch_command("fsdp2")),
    Contender("nanotrain", 1, nanotrain_command("--no-torch-compile"), ("torch",)),
    Contender("torch, compiled", 1, torch_command("single", "--compile")),
    Contender(COMPILED_TOO, 1, torch_command("single", "--compile", "--compile-loss")),
    Contender(COMPILED, 1, nanotrain_command("--torch-compile"), ("torch, compiled", COMPILED_TOO)),
)
FP8 = ("--fp8-format=hybrid", "--fp8-recipe=tensorwise")
IN_FP8 = Contender(
    "nanotrain, compiled, fp8", 1, nanotrain_command("--torch-compile", *FP8), (COMPILED,)
)
EXPERTS = ("--num-experts=4", "--moe-router-topk=2")
MIXTURE = (
    Contender("nanotrain", 1, nanotrain_command(*EXPERTS, "--no-torch-compile")),
    Contender(COMPILED, 1, nanotrain_command(*EXPERTS, "--torch-compile")),
)
# What runs, in this order, for one model after the other; the peers that explain least are last.
PROFILE = "profile"
PHASES = (
    (COMPILED, PROFILE, COMPILED_TOO),
    (IN_FP8.name, "torch, compiled", "nanotrain", "torch"),
    ("torch FSDP2, one rank",),
)
# name -> its shape in baselines.py, the contenders, and the flags of nanotrain beside the shape
MODELS: dict[str, tuple[str, tuple[Contender, ...], tuple[str, ...]]] = {
    "llama1b": ("llama1b", (*DENSE, IN_FP8), ()),
    "124m": ("124m", DENSE, ()),
    "moe4": ("124m", MIXTURE, EXPERTS),
    "smoke": ("smoke", DENSE, ()),
}
T = TypeVar("T")
FIRST_LAUNCH_S = 60.0  # what a launch is expected to take at most, before any was measured
# class -> pattern of the names of its CUDA kernels, and of torch's operators in a CPU profile; the
# first match counts
KERNELS = {
    "communication": r"nccl|c10d",
    "attention": r"flash|fmha|cudnn.*(sdpa|attn)|attention",
    "GEMM": r"gemm|cutlass|wgmma|nvjet|_grouped_wgrad|^_multiply|aten::(mm|addmm|bmm|_grouped_mm)$",
    "optimizer": r"adam|multi_tensor|_foreach",
    "loss": r"softmax|logsumexp|nll_loss",
    "elementwise": "",
}


def model_flops(shape: Shape) -> int:
    """Floating-point operations per token, forward and backward, by the convention of nanotrain's
    log.
    """
    return flops_per_token(ModelShape.of(model_config(shape)), shape.seq)


def table(
    contenders: Sequence[Contender],
    outcomes: dict[str, list[Outcome]],
    *,
    flops: int | None,
    peak: float | None,
) -> str:
    """The Markdown table of medians over rounds; without the FLOPs per token, or the peak, there is
    no MFU.
    """
    lines = ["| contender | tokens/s | ratio | MFU | peak memory |", "|---|---:|---:|---:|---:|"]
    for contender in contenders:
        measured = outcomes[contender.name]
        if not measured:
            continue
        speed = statistics.median(outcome.tokens_per_second for outcome in measured)
        ratios = {
            name: ratio_of(measured, outcomes[name]) for name in contender.rivals if outcomes[name]
        }
        ratio = ", ".join(f"{number:.2f}x of {name}" for name, number in ratios.items())
        mfu = f"{speed * flops / peak:.1%}" if flops and peak else "unknown"
        memory = max(outcome.peak_memory_bytes for outcome in measured) / 2**30
        lines.append(f"| {contender.name} | {speed:,.0f} | {ratio} | {mfu} | {memory:.1f} GiB |")
    return "\n".join(lines)


def ratio_of(measured: Sequence[Outcome], rival: Sequence[Outcome]) -> float:
    """The median over rounds of the ratio of two contenders' speeds."""
    pairs = zip(measured, rival, strict=False)
    return statistics.median(
        mine.tokens_per_second / other.tokens_per_second for mine, other in pairs
    )


def class_of(kernel: str) -> str:
    """The class of a kernel or operator by its name.

    >>> class_of("sm90_xmma_gemm_bf16bf16_bf16f32"), class_of("pytorch_flash::flash_fwd_kernel"), class_of("aten::mul")
    ('GEMM', 'attention', 'elementwise')
    """
    return next(
        name for name, pattern in KERNELS.items() if re.search(pattern, kernel, re.IGNORECASE)
    )


def kernel_times(events: Iterable[dict[str, Any]], *, category: str) -> Counter[str]:
    """Milliseconds by class of the events of one category in a chrome trace: "kernel" or "cpu_op"
    (nested too).
    """
    times: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == category:
            times[class_of(event["name"])] += event["dur"] / 1e3
    return times


def profiled(job: Job, flags: Sequence[str], *, timeout_s: float | None) -> Counter[str]:
    """Kernel times of the last step of a run of nanotrain."""
    last = job.warmup + job.steps
    with TemporaryDirectory() as folder:
        profile = (
            "--profile",
            f"--profile-step-start={last}",
            f"--profile-step-end={last}",
            f"--run-dir={folder}",
        )
        launch(
            [Contender("profile", 1, nanotrain_command(*flags, *profile))], job, timeout_s=timeout_s
        )
        (trace,) = Path(folder).rglob("profile/*.json")
        events = json.loads(trace.read_text())["traceEvents"]
    return kernel_times(events, category="kernel" if job.device == "cuda" else "cpu_op")


def card_here(device: str) -> str | None:
    """The name of this machine's card in roofline.py, where it is there."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next(
        (card for card, facts in CARDS.items() if facts.device_name == name or card in name), None
    )


def budget_here(job: Job, flags: Sequence[str], *, card: str) -> dict[str, float]:
    """Milliseconds per step by class of kernels that roofline.py plans: eager operators, not
    overlapped.
    """
    arguments = nanotrain_command(*flags)(job, Path("unused"))[1:]
    plan = plan_run(load(arguments).config, 1, rank=0)
    costs = budget_of(plan, CARDS[card]).costs
    times = {name: costs[name].seconds * 1e3 for name in KERNELS}
    times["elementwise"] += costs["gradients"].seconds * 1e3  # copies and additions
    return times


class Launches:
    """Launches one after the other, until the time is up.

    Args:
        minutes: a launch that would end later, if it lasts as long as the longest before, is left
            out, and one that has not ended by then is ended; None: no limit.
        rows: where the launches become rows.
    """

    def __init__(self, minutes: float | None, rows: RowReport) -> None:
        self.rows = rows
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._lasted: list[float] = []  # seconds of each launch
        self.left_out: list[tuple[str, str]] = []  # models and what was not launched
        self.failed: list[tuple[str, str]] = []  # models and what was launched and failed

    def run(self, model: str, part: str, function: Callable[..., T]) -> T | None:
        """The result of a function that launches one run within `timeout_s`; None if the time is
        up, or it failed.
        """
        began = time.monotonic()
        if self._end is not None and began + max(self._lasted, default=FIRST_LAUNCH_S) > self._end:
            self.left_out.append((model, part))
            self.rows.add(Row(f"{model} {part}", LEFT_OUT, "the time was up"))
            return None
        try:
            return function(timeout_s=None if self._end is None else self._end - began)
        except SystemExit as error:
            print(error, flush=True)
            self.failed.append((model, part))
            self.rows.add(Row(f"{model} {part}", FAILED, str(error).splitlines()[-1][:200]))
            return None
        finally:
            self._lasted.append(time.monotonic() - began)

    def report(self) -> int:
        """Print what is missing, with the command that measures it; returns the exit code."""
        for title, parts in (
            ("left out, as the time was up", self.left_out),
            ("failed", self.failed),
        ):
            if parts:
                models = dict.fromkeys(model for model, _ in parts)
                print(f"\n{title}: {', '.join(f'{model} {part}' for model, part in parts)}")
                print(
                    f"to measure these models: python benchmarks/gpu.py --model {' '.join(models)}",
                    flush=True,
                )
        return int(bool(self.failed))


class Comparison:
    """The contenders of one model, and what was measured of them.

    Args:
        name: a key of `MODELS`.
        args: of the command line.
        launches: runs them.
    """

    def __init__(self, name: str, args: argparse.Namespace, launches: Launches) -> None:
        shape, self.contenders, self.flags = MODELS[name]
        dtype = "bf16" if args.device == "cuda" else "fp32"
        self.name, self.args, self.launches = name, args, launches
        self.job = Job(
            shape,
            dtype,
            args.warmup,
            args.steps,
            device=args.device,
            num_microbatches=args.microbatches,
        )
        self.outcomes: dict[str, list[Outcome]] = {
            contender.name: [] for contender in self.contenders
        }

    def run(self, phase: Sequence[str]) -> None:
        """Launch the parts of a phase, for all rounds; a profile once."""
        by_name = {contender.name: contender for contender in self.contenders}
        for number in range(1, self.args.rounds + 1):
            for part in phase:
                if part == PROFILE and number == 1:
                    self._profile()
                elif part in by_name:
                    self._measure(by_name[part], number)

    def _measure(self, contender: Contender, number: int) -> None:
        part = f"{contender.name}, round {number}"
        measured = self.launches.run(self.name, part, partial(launch, [contender], self.job))
        if measured is None:
            return
        self.outcomes[contender.name].extend(measured)
        speed, memory = measured[-1].tokens_per_second, measured[-1].peak_memory_bytes / 2**30
        name = f"{self.name} {contender.name}, round {number}"
        self.launches.rows.add(Row(name, OK, f"{speed:,.0f} tokens/s, {memory:.1f} GiB"))

    def _profile(self) -> None:
        times = self.launches.run(self.name, PROFILE, partial(profiled, self.job, self.flags))
        if times is None:
            return
        card = card_here(self.args.device)
        planned: dict[str, float] = {}
        try:
            planned = budget_here(self.job, self.flags, card=card) if card else {}
        except Exception as error:  # the times were measured; what is planned stands beside them
            print(f"no budget: {type(error).__name__}: {error}", flush=True)
        print(f"\n| class, {self.name} | ms per step | share | budget, {card or 'no known card'} |")
        print("|---|---:|---:|---:|")
        for kind in KERNELS:
            budget = f"{planned[kind]:,.1f}" if kind in planned else ""
            print(
                f"| {kind} | {times[kind]:,.1f} | {times[kind] / max(times.total(), 1e-9):.0%} | {budget} |"
            )
        shares = [f"{kind} {times[kind]:,.1f} ms" for kind in KERNELS]
        self.launches.rows.add(Row(f"{self.name} {PROFILE}", OK, ", ".join(shares)))

    def report(self, *, peak: float | None) -> None:
        """Print the table of all contenders; `peak` is the FLOP/s of the card."""
        args, flops = self.args, None if self.flags else model_flops(self.job.shape)
        print(
            f"\n{self.name}, {self.job.dtype}, {args.microbatches} microbatches per step, {args.rounds} rounds\n"
        )
        print(table(self.contenders, self.outcomes, flops=flops, peak=peak), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare every model; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", nargs="+", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="launch nothing that would end later")
    parser.add_argument("--out", type=Path, help="folder of a file with the rows")
    parser.add_argument("--microbatches", type=int, default=8, help="per step (default: 8)")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing to measure; --device cpu runs the programs on a tiny model")
        return 2
    name = (
        torch.cuda.get_device_name()
        if args.device == "cuda"
        else "CPU, a check that the programs run"
    )
    machine = f"{name}, torch {torch.__version__}"
    print(machine, flush=True)
    rows = RowReport("headline", folder=args.out, machine=machine)
    launches = Launches(args.minutes, rows)
    models = args.model or (["llama1b", "124m", "moe4"] if args.device == "cuda" else ["smoke"])
    comparisons = [Comparison(model, args, launches) for model in models]
    for phase in PHASES:
        for comparison in comparisons:
            comparison.run(phase)
    for comparison in comparisons:
        comparison.report(peak=peak_flops(name, "bf16"))
    return launches.report()


if __name__ == "__main__":
    sys.exit(main())
