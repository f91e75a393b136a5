"""One rank of nanotrain, timed: `torchrun benchmarks/rank.py` takes the arguments of `python -m
nanotrain.train`.

It trains with the hooks of an ordinary run and one more, which records time, CPU time and bytes
sent of every step. After `--then` the arguments of another run may follow, on the same processes
(CPU only): starting processes takes longer than the measurement. Rank 0 prints one JSON object per
run, of the same form as `baselines.py`:

    step_time_s          of rank 0
    cpu_time_s           all threads of all ranks together, without the processes that load data
    tokens_per_step      over all ranks
    peak_memory_bytes    of rank 0
    sent                 bytes of the last step per rank, by group: the mean over ranks
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch.distributed as dist

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.log import start_logging
from nanotrain.plan.plan import Plan, plan_run
from nanotrain.topology.topology import Topology
from nanotrain.train.build import build_run
from nanotrain.train.fit import fit
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.inputs import open_inputs
from nanotrain.train.open_run import choose_hooks
from nanotrain.train.run import Run, RunInputs
from nanotrain.train.step_report import StepReport


@dataclass
class Meter(Hook):
    """Records what each step cost this rank; the last of the hooks, so that their cost is included."""

    reports: list[StepReport] = field(default_factory=list)
    cpu_time_s: list[float] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    _cpu_before: float = 0.0

    def before_training(self, run: Run) -> None:
        run.context.traffic.reset()
        self._cpu_before = time.process_time()

    def after_step(self, run: Run, report: StepReport) -> None:
        now, traffic = time.process_time(), run.context.traffic
        self.reports.append(report)
        self.cpu_time_s.append(now - self._cpu_before)
        self.sent = {
            name: traffic.bytes(name) for name in run.context.groups if traffic.bytes(name)
        }
        traffic.reset()
        self._cpu_before = now


def summary(meter: Meter, run: Run) -> dict[str, Any]:
    """Merge the meters of all ranks into one report; collective."""
    ranks = all_gather_object((meter.cpu_time_s, meter.sent), run.context.control)
    groups = sorted({name for _, sent in ranks for name in sent})
    return {
        "step_time_s": [report.step_time_s for report in meter.reports],
        "cpu_time_s": [sum(step) for step in zip(*(cpu for cpu, _ in ranks), strict=True)],
        "tokens_per_step": run.plan.sampler.global_batch_size * run.config.data.seq_length,
        "peak_memory_bytes": meter.reports[-1].peak_memory_bytes,
        "sent": {name: fmean(sent.get(name, 0) for _, sent in ranks) for name in groups},
    }


def train(plan: Plan, inputs: RunInputs, context: ParallelContext) -> None:
    """Train; rank 0 prints the report."""
    run, meter = build_run(plan, inputs, context=context), Meter()
    try:
        fit(run, [*choose_hooks(plan.config, inputs.tokenizer), meter])
        report = summary(meter, run)
    finally:
        run.batches.close()
    if context.rank == 0:
        print(json.dumps(report), flush=True)


@contextmanager
def attached(topology: Topology) -> Iterator[ParallelContext]:
    """Create groups for another run on the default process group, and destroy them afterwards."""
    context = ParallelContext.attach(topology)
    groups = [
        group
        for group in (context.control, *context.groups.values())
        if group.process_group is not None
    ]
    created = (
        {id(group.process_group): group.process_group for group in groups}
        if dist.is_initialized()
        else {}
    )
    created.pop(id(dist.group.WORLD), None)
    try:
        yield context
    finally:
        for group in groups:
            group.release()
        for process_group in created.values():
            dist.destroy_process_group(process_group)


def main() -> None:
    """Train with the arguments of the command line, one run after the other."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    start_logging(is_first=rank == 0)
    commands: list[list[str]] = [[]]
    for argument in sys.argv[1:]:
        commands.append([]) if argument == "--then" else commands[-1].append(argument)
    opened = [open_inputs(load(arguments)) for arguments in commands]
    plans = [(plan_run(config, world_size, rank=rank), inputs) for config, inputs in opened]
    first, inputs = plans[0]
    with ParallelContext.start(first.topology, device=first.config.train.device) as context:
        train(first, inputs, context)
        for plan, inputs in plans[1:]:
            with attached(plan.topology) as another:
                train(plan, inputs, another)


if __name__ == "__main__":
    main()
