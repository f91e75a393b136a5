"""One rank of nanotrain, timed: `torchrun benchmarks/rank.py` takes the words of `python -m nanotrain.train`.

It trains with the hooks of an ordinary run and one more, which notes clock, CPU time and bytes sent of every step.
Rank 0 then prints one JSON object, of the same form as `baselines.py`:

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
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from nanotrain.comm.collectives import gather_objects
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.log import start_logging
from nanotrain.train.build import build_run
from nanotrain.train.hooks import Hook
from nanotrain.train.launch import choose_hooks
from nanotrain.train.metrics import StepReport
from nanotrain.train.resolve import resolve
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
        run.context.ledger.reset()
        self._cpu_before = time.process_time()

    def after_step(self, run: Run, report: StepReport) -> None:
        now, ledger = time.process_time(), run.context.ledger
        self.reports.append(report)
        self.cpu_time_s.append(now - self._cpu_before)
        self.sent = {name: ledger.bytes(name) for name in run.context.groups if ledger.bytes(name)}
        ledger.reset()
        self._cpu_before = now


def summary(meter: Meter, run: Run) -> dict[str, Any]:
    """The meters of all ranks as one report; every rank must call it."""
    ranks = gather_objects((meter.cpu_time_s, meter.sent), run.context.control)
    groups = sorted({name for _, sent in ranks for name in sent})
    return {
        "step_time_s": [report.step_time_s for report in meter.reports],
        "cpu_time_s": [sum(step) for step in zip(*(cpu for cpu, _ in ranks), strict=True)],
        "tokens_per_step": run.place.global_batch_size * run.config.data.seq_length,
        "peak_memory_bytes": meter.reports[-1].peak_memory_bytes,
        "sent": {name: fmean(sent.get(name, 0) for _, sent in ranks) for name in groups},
    }


def main() -> None:
    """Train as the command line says and print what it cost."""
    plan = resolve(load(sys.argv[1:]), int(os.environ.get("WORLD_SIZE", "1")))
    start_logging(is_first=os.environ.get("RANK", "0") == "0")
    with ParallelContext.start(plan.topology, device=plan.config.train.device.value) as context:
        run, meter = build_run(plan, context), Meter()
        try:
            Trainer(run, [*choose_hooks(plan.config, plan.tokenizer), meter]).fit()
            report = summary(meter, run)
        finally:
            run.batches.close()
        if context.rank == 0:
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
