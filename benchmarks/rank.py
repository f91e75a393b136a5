"""One rank of nanotrain, timed: `torchrun benchmarks/rank.py` takes the words of `python -m nanotrain.train`.

It trains with the hooks of an ordinary run and one more, which notes clock, CPU time and bytes sent of every step.
After the word `--then` the words of another run may follow, on the same processes (CPU only): starting them takes
longer than what is measured. Rank 0 prints one JSON object for every run, of the same form as `baselines.py`:

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
from nanotrain.train.build import build_run
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.inputs import RunInputs, open_inputs
from nanotrain.train.launch import choose_hooks
from nanotrain.train.metrics import StepReport
from nanotrain.train.plan import Plan, plan_run
from nanotrain.train.run import Run
from nanotrain.train.trainer import Trainer


@dataclass
class Meter(Hook):
    """Notes what each step cost this rank; the last of the hooks, so that theirs counts too."""

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
        self.sent = {name: traffic.bytes(name) for name in run.context.groups if traffic.bytes(name)}
        traffic.reset()
        self._cpu_before = now


def summary(meter: Meter, run: Run) -> dict[str, Any]:
    """The meters of all ranks as one report; every rank must call it."""
    ranks = all_gather_object((meter.cpu_time_s, meter.sent), run.context.control)
    groups = sorted({name for _, sent in ranks for name in sent})
    return {
        "step_time_s": [report.step_time_s for report in meter.reports],
        "cpu_time_s": [sum(step) for step in zip(*(cpu for cpu, _ in ranks), strict=True)],
        "tokens_per_step": run.plan.sampler.global_batch_size * run.config.data.seq_length,
        "peak_memory_bytes": meter.reports[-1].peak_memory_bytes,
        "sent": {name: fmean(sent.get(name, 0) for _, sent in ranks) for name in groups},
    }


def train(plan: Plan, inputs: RunInputs, *, context: ParallelContext) -> None:
    """Train as planned; rank 0 prints what it cost."""
    run, meter = build_run(plan, inputs, context=context), Meter()
    try:
        Trainer(run, [*choose_hooks(plan.config, inputs.tokenizer), meter]).fit()
        report = summary(meter, run)
    finally:
        run.batches.close()
    if context.rank == 0:
        print(json.dumps(report), flush=True)


@contextmanager
def attached(plan: Plan) -> Iterator[ParallelContext]:
    """Groups for another run among the ranks that have met already, given back afterwards."""
    context = ParallelContext.attach(plan.topology)
    groups = [group for group in (context.control, *context.groups.values()) if group.process_group is not None]
    own = {id(group.process_group): group.process_group for group in groups} if dist.is_initialized() else {}
    own.pop(id(dist.group.WORLD), None)
    try:
        yield context
    finally:
        for group in groups:
            group.release()
        for process_group in own.values():
            dist.destroy_process_group(process_group)


def main() -> None:
    """Train as the command line says, run after run."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    start_logging(is_first=os.environ.get("RANK", "0") == "0")
    commands: list[list[str]] = [[]]
    for word in sys.argv[1:]:
        commands.append([]) if word == "--then" else commands[-1].append(word)
    rank, opened = int(os.environ.get("RANK", "0")), [open_inputs(load(words)) for words in commands]
    plans = [plan_run(config, world_size, rank=rank) for config, _ in opened]
    runs = list(zip(plans, (inputs for _, inputs in opened), strict=True))
    with ParallelContext.start(plans[0].topology, device=plans[0].config.train.device.value) as context:
        train(*runs[0], context)
        for plan, inputs in runs[1:]:
            with attached(plan) as another:
                train(plan, inputs, another)


if __name__ == "__main__":
    main()
