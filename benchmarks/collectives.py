"""Reduce-scatter and all-gather on gloo: nanotrain's beside gloo's own and beside an all-reduce, in turn in one run.

    python benchmarks/collectives.py                              a table on the terminal
    python benchmarks/collectives.py --output FILE --note TEXT    and as Markdown

Every round runs each operation once, so that load from elsewhere falls on all alike; times are medians over the
rounds, bytes are what the loopback interface counted, per rank and as a multiple of the tensor.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist

from nanotrain.comm.collectives import all_gather_into, barrier, reduce_scatter_into
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import ParallelConfig
from nanotrain.topology.topology import Topology

MIB = 1 << 20
HEAD = "| ranks | MiB fp32 | operation | ms | x all-reduce | x gloo's own | bytes sent per rank / tensor |"
RULE = "|---|---|---|---|---|---|---|"
ABOUT = """# gloo collectives

{note}. `python benchmarks/collectives.py`, median of {rounds} rounds, one thread a rank, torch {torch}.

gloo's reduce-scatter runs a whole all-reduce; nanotrain's sends (d-1)/d of the tensor and sums in rank order.
gloo's all-gather sends as little as nanotrain's but copies the result once more.
"""


@dataclass
class Measured:
    """What the rounds of one operation showed."""

    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return statistics.median(self.seconds) * 1000


def loopback_bytes() -> int:
    """Bytes the loopback interface has sent so far; 0 where that is not told."""
    table = Path("/proc/net/dev")
    lines = table.read_text().splitlines() if table.exists() else []
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0)


def operations(group: Group, num_bytes: int) -> dict[str, Callable[[], None]]:
    """Each operation on a full fp32 tensor of that many bytes, by name; gloo's own before ours."""
    full = torch.zeros(num_bytes // 4 // group.size * group.size)
    part, whole = torch.zeros(full.numel() // group.size), torch.empty_like(full)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return {
        "all-reduce": lambda: dist.all_reduce(full),
        "reduce-scatter, gloo": lambda: scatter(part, full),
        "reduce-scatter, nanotrain": lambda: reduce_scatter_into(part, full, group=group),
        "all-gather, gloo": lambda: gather(whole, part),
        "all-gather, nanotrain": lambda: all_gather_into(whole, part, group=group),
    }


def measure(ctx: ParallelContext, num_bytes: int, num_rounds: int) -> dict[str, Measured]:
    """Run every operation in turn, one warm-up round first."""
    runs = operations(ctx.group("world"), num_bytes)
    measured = {name: Measured() for name in runs}
    for number in range(num_rounds + 1):
        for name, run in runs.items():
            barrier(ctx.control)
            before = loopback_bytes()
            barrier(ctx.control)
            started = time.perf_counter()
            run()
            elapsed = time.perf_counter() - started
            barrier(ctx.control)
            if number > 0:
                measured[name].seconds.append(elapsed)
                measured[name].sent.append(loopback_bytes() - before)
    return measured


def rows(size: int, mib: int, measured: dict[str, Measured]) -> list[str]:
    """The lines of the table for one world and one tensor."""
    reference, lines = measured["all-reduce"], []
    for name, one in measured.items():
        own = measured.get(name.replace("nanotrain", "gloo"), one)
        against_own = f"{one.ms / own.ms:.2f}" if own is not one else ""
        # The least of the rounds: other programs' traffic only adds.
        sent = min(one.sent) / size / (mib * MIB)
        lines.append(
            f"| {size} | {mib} | {name} | {one.ms:.2f} | {one.ms / reference.ms:.2f} | {against_own} | {sent:.2f} |"
        )
    return lines


def play_rank(args: argparse.Namespace) -> None:
    """One rank of a world that torchrun has started; the first one writes the rows."""
    size = int(os.environ["WORLD_SIZE"])
    with ParallelContext.start(Topology.of(ParallelConfig(), size), device="cpu", timeout_s=120) as ctx:
        for mib in args.mib:
            lines = rows(size, mib, measure(ctx, mib * MIB, args.rounds))
            if ctx.rank == 0:
                print("\n".join(lines), flush=True)
                with Path(args.output).open("a") as output:
                    output.write("\n".join(lines) + "\n")


def launch(args: argparse.Namespace) -> None:
    """Start one world after the other and put their rows under one head."""
    print(HEAD, RULE, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "rows"
        for size in args.ranks:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
            options = ["--rounds", str(args.rounds), "--mib", *map(str, args.mib), "--output", str(table)]
            subprocess.run([*torchrun, __file__, *options], check=True)
        if args.output:
            text = f"{ABOUT.format(note=args.note, rounds=args.rounds, torch=torch.__version__)}\n{HEAD}\n{RULE}\n"
            Path(args.output).write_text(text + table.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", default="")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    if "RANK" in os.environ:
        play_rank(args)
    else:
        launch(args)


if __name__ == "__main__":
    main()
