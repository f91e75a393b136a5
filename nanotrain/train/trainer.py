"""The loop: feed, step, report, hooks, until the steps are done or someone wants to stop.

Reasons to stop, all between two steps and all on every rank at once: the last step; `exit_interval`;
`exit_duration_in_mins`, SIGTERM and SIGINT (any rank's clock or signal; the roll call before the next step spreads
it). Then the hooks write what has to be written and the process exits with 0. Whatever ends the loop, an error too,
the hooks are closed.
"""

import gc
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from nanotrain.log import get_logger
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.metrics import Speedometer, StepClock, report_step
from nanotrain.train.run import Run
from nanotrain.train.step import train_step

log = get_logger(__name__)


class Trainer:
    """Runs the steps of a run.

    Args:
        run: the built parts.
        hooks: called in this order.
    """

    def __init__(self, run: Run, hooks: Sequence[Hook]) -> None:
        self.run, self.hooks = run, hooks
        self._speed = Speedometer.of(run.config, run.context, global_batch_size=run.plan.sampler.global_batch_size)
        self._signal: int | None = None
        self._started = time.monotonic()
        self._first_step = run.state.step

    def fit(self) -> None:
        """Train until a reason to stop comes up."""
        failed = True
        try:
            with self._stopping_on_signals(), manual_gc(self.run.config.train.manual_gc_interval):
                self._run_steps()
            failed = False
        finally:
            for hook in reversed(self.hooks):
                hook.close(failed=failed)

    def _run_steps(self) -> None:
        for hook in self.hooks:
            hook.before_training(self.run)
        while not self._is_done() and self._one_step():
            pass
        for dp in self.run.data_parallel:
            dp.finish_param_gather()
        for hook in self.hooks:
            hook.after_training(self.run)

    def _one_step(self) -> bool:
        """Take a step; False if the ranks agreed to stop instead."""
        run, start = self.run, time.perf_counter()
        batch = run.batch_iterator.next(wants_stop=self._wants_stop())
        if batch is None:
            log.info("stopping after step %d: %s", run.state.step, self._reason())
            return False
        loss_scale = run.optimizer.loss_scale.scale
        result = train_step(run, batch)
        clock = StepClock(step_time_s=time.perf_counter() - start, data_wait_s=batch.wait_s)
        report = report_step(
            result, run.state, clock=clock, speed=self._speed, context=run.context, loss_scale=loss_scale
        )
        for hook in self.hooks:
            hook.after_step(run, report)
        interval = run.config.train.manual_gc_interval
        if interval and run.state.step % interval == 0:
            gc.collect()
        return True

    def _is_done(self) -> bool:
        train, step = self.run.config.train, self.run.state.step
        if step >= train.train_iters:
            return True
        if not train.exit_interval or step == self._first_step or step % train.exit_interval:
            return False
        log.info("stopping after step %d: a multiple of --exit-interval %d", step, train.exit_interval)
        return True

    def _wants_stop(self) -> bool:
        limit = self.run.config.train.exit_duration_in_mins
        return self._signal is not None or (limit is not None and time.monotonic() - self._started >= limit * 60)

    def _reason(self) -> str:
        if self._signal is not None:
            return f"received {signal.Signals(self._signal).name}"
        return "--exit-duration-in-mins is over" if self._wants_stop() else "another rank was asked to stop"

    @contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        """SIGTERM or SIGINT ends the run after the present step, a second SIGINT (Ctrl-C) at once.

        A second SIGTERM does not: schedulers send one to every process and torchrun another one to its ranks.
        """
        before = {number: signal.getsignal(number) or signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGINT)}

        def remember(number: int, frame: FrameType | None) -> None:
            self._signal = number
            if number == signal.SIGINT:
                signal.signal(number, before[signal.SIGINT])

        for number in before:
            signal.signal(number, remember)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def manual_gc(interval: int) -> Iterator[None]:
    """Collect Python garbage at agreed steps only: a rank that stops to collect stops all the others."""
    if not interval:
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
