"""The time of a restart in place, in the log and in restarts.jsonl of the run folder."""

import json
import time

from nanotrain.comm.generation_store import Restart
from nanotrain.log import get_logger
from nanotrain.quantities import count_of
from nanotrain.runs.failures import remove_cured
from nanotrain.runs.files import disk_errors, open_append, write_all
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport

FILE = "restarts.jsonl"

log = get_logger(__name__)


class RestartHook(Hook):
    """Records a restart on the first rank, once its first step is done."""

    def __init__(self) -> None:
        self._built_s = 0.0  # when the run had its state, in seconds since the epoch

    def before_training(self, run: Run) -> None:
        self._built_s = time.time()

    def after_step(self, run: Run, report: StepReport) -> None:
        generation = run.context.generation
        if generation is not None and run.context.control.is_first:
            generation.completed(report.step)

    def begin_writing(self, run: Run, *, step: int) -> None:
        """Log how long each part of a restart in place took, and append it to restarts.jsonl."""
        generation = run.context.generation
        if generation is None or generation.restart is None or not run.context.control.is_first:
            return
        restart = generation.restart
        num_ranks = len(generation.members)
        seconds = seconds_of_restart(
            restart,
            connected_s=generation.connected_s,
            built_s=self._built_s,
            stepped_s=time.time(),
        )
        total_s = sum(seconds.values())
        parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        log.info(
            "restart in place %d of at most %d, from step %d%s: %s; %.2f s: %s",
            generation.number,
            generation.max_restarts,
            step,
            f" on {count_of(num_ranks, 'rank')}" if generation.num_left else "",
            restart.fault.text,
            total_s,
            parts,
        )
        row = {
            "time_s": restart.fault.time_s,
            "restart": generation.number,
            "step": step,
            "ranks": num_ranks,
            "rank": restart.fault.rank,
            "fault": restart.fault.what,
            "fault_step": restart.fault.step,
            "total_seconds": round(total_s, 3),
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
        }
        remove_cured(run.folder.path, members=generation.members)
        path = run.folder.path / FILE
        with open_append(path) as file, disk_errors(path):
            write_all(file, json.dumps(row).encode() + b"\n")


def seconds_of_restart(
    restart: Restart, *, connected_s: float, built_s: float, stepped_s: float
) -> dict[str, float]:
    """Where a restart spent its time, from the fault to the first step.

    Clocks of machines differ, so a part that would be negative is 0. Times are in seconds since the
    epoch.

    Args:
        restart: the fault, and when ranks noticed it and met.
        connected_s: when the groups were there.
        built_s: when the state was there.
        stepped_s: when the first step was done.
    """
    borders = {
        "notice": restart.noticed_s,
        "agree": restart.met_s,
        "groups": connected_s,
        "load": built_s,
        "first step": stepped_s,
    }
    seconds = {}
    begun_s = restart.fault.time_s
    for name, end_s in borders.items():
        seconds[name] = max(0.0, end_s - begun_s)
        begun_s = max(begun_s, end_s)
    return seconds
