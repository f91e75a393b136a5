"""Reduce-scatter and all-gather on gloo: nanotrain's, gloo's own, and an all-reduce, in turn.

    python benchmarks/collectives.py                              print a table
    python benchmarks/collectives.py --output FILE --note TEXT    also write it as Markdown

Every round runs each operation once, so other load affects all of them. Times are medians over the
rounds. Bytes are those of the loopback interface, per rank and as a multiple of the tensor.
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

from nanotrain.comm.collectives import all_gather_into, barrier, start_reduce_scatter_into
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.parallel import ParallelConfig
from nanotrain.topology.topology import Topology

MIB = 1 << 20
HEAD = "| ranks | MiB fp32 | operation | ms | x all-reduce | x gloo's own | bytes sent per rank / tensor |"
RULE = "|---|---|---|---|---|---|---|"
ABOUT = """# gloo collectives

{note}. `python benchmarks/collectives.py`, median of {rounds} rounds, one thread per rank, torch {torch}.

gloo's reduce-scatter runs an all-reduce; nanotrain's sends (d-1)/d of the tensor and sums in rank order.
gloo's all-gather sends as little as nanotrain's but copies the result once more.
"""


@dataclass
class Measured:
    """Measurements of one operation over the rounds."""

    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return statistics.median(self.seconds) * 1000


def loopback_bytes() -> int:
    """Bytes the loopback interface has sent so far; 0 where the system does not report it."""
    table = Path("/proc/net/dev")
    lines = table.read_text().splitlines() if table.exists() else []
    return next(
        (int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0
    )


def operations(group: Group, num_bytes: int) -> dict[str, Callable[[], None]]:
    """Each operation by name, on an fp32 tensor of `num_bytes`; gloo's own before nanotrain's."""
    full = torch.zeros(num_bytes // 4 // group.size * group.size)
    shard, gathered = torch.zeros(full.numel() // group.size), torch.empty_like(full)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return {
        "all-reduce": lambda: dist.all_reduce(full),
        "reduce-scatter, gloo": lambda: scatter(shard, full),
        "reduce-scatter, nanotrain": lambda: start_reduce_scatter_into(
            shard, full, group=group
        ).wait(),
        "all-gather, gloo": lambda: gather(gathered, shard),
        "all-gather, nanotrain": lambda: all_gather_into(gathered, shard, group=group),
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
    """The table rows of one world size and tensor size."""
    reference, lines = measured["all-reduce"], []
    for name, figures in measured.items():
        gloo = measured.get(name.replace("nanotrain", "gloo"), figures)
        ratio = f"{figures.ms / gloo.ms:.2f}" if gloo is not figures else ""
        # The minimum of the rounds: traffic of other programs only adds.
        sent = min(figures.sent) / size / (mib * MIB)
        times = f"{figures.ms:.2f} | {figures.ms / reference.ms:.2f}"
        lines.append(f"| {size} | {mib} | {name} | {times} | {ratio} | {sent:.2f} |")
    return lines


def run_rank(args: argparse.Namespace) -> None:
    """Run one rank under torchrun; rank 0 writes the rows."""
    size = int(os.environ["WORLD_SIZE"])
    with ParallelContext.start(
        Topology.of(ParallelConfig(), size), device="cpu", timeout_s=120
    ) as ctx:
        for mib in args.mib:
            lines = rows(size, mib, measure(ctx, mib * MIB, args.rounds))
            if ctx.rank == 0:
                print("\n".join(lines), flush=True)
                with Path(args.output).open("a") as output:
                    output.write("\n".join(lines) + "\n")


def launch(args: argparse.Namespace) -> None:
    """Launch the world sizes one after the other and collect their rows in one table."""
    print(HEAD, RULE, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "rows"
        for size in args.ranks:
            torchrun = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(size),
            ]
            options = [
                "--rounds",
                str(args.rounds),
                "--mib",
                *map(str, args.mib),
                "--output",
                str(table),
            ]
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
        run_rank(args)
    else:
        launch(args)


if __name__ == "__main__":
    main()
