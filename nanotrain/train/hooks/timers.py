"""`--timing-log-level`: ranges in traces and times of the phases of a step, without a host sync.

    level 1   data, forward-backward, grad-reduce, optimizer, param-gather, hooks, validation,
              checkpoint
    level 2   also the actions of the pipeline schedule: F, B, I, W; a wait for another stage is
              part of the action

A phase ends where the next one begins, on a GPU when the current stream reaches that point.
Collectives that overlap count where they are waited for: gradients in grad-reduce, parameters in
the forward pass of the next step.
"""

from contextlib import ExitStack

from nanotrain.comm.device import Stopwatch, trace_range
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport


class TimersHook(Hook):
    """Times the phases of this rank's heartbeat and marks them in traces.

    `--profile` has the marks of level 1.
    """

    def __init__(self) -> None:
        self._open: list[ExitStack] = []  # the running phase, then its running action
        self._ended: list[tuple[str, Stopwatch]] = []  # since the last report

    def before_training(self, run: Run) -> None:
        self._run = run
        run.context.heartbeat.observer = self._begin

    def after_step(self, run: Run, report: StepReport) -> None:
        report.phases = self._ended if run.config.train.timing_log_level else ()
        self._ended = []

    def close(self, *, failed: bool) -> None:
        self._end(1)

    def _begin(self, name: str, level: int) -> None:
        """Time a phase (level 1) or an action in it (level 2), after the end of the earlier one."""
        self._end(level)
        if level > max(1, self._run.config.train.timing_log_level):
            return
        device = self._run.context.device
        # The phase of the hooks ends in the next step: its range would overlap the step's.
        opened = ExitStack() if name == "hooks" else trace_range(name, device)
        opened.callback(self._stop, name, Stopwatch(device))
        self._open.append(opened)

    def _stop(self, name: str, watch: Stopwatch) -> None:
        watch.stop()
        self._ended.append((name, watch))

    def _end(self, level: int) -> None:
        """End the running phase or action of this level, and the actions inside it."""
        while len(self._open) >= level:
            self._open.pop().close()
