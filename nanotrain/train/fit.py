"""The training loop: next batch, train step, report, hooks.

A run stops between two steps, on all ranks together: after the last step, at `exit_interval`, after
`exit_duration_in_mins`, on SIGTERM, SIGINT or SIGHUP. The clock or signal of one rank stops all
through the all-reduce before the next step. A signal during a long step stops all ranks before the
same microbatch (`comm/stop_point.py`), and the step is abandoned. The hooks then save and the
process exits with 0. SIGUSR1 to one rank saves and goes on.

An error of one rank's hook or data is raised on all ranks before the next step; the hooks save the
last step before that. Hooks are closed after an error too.
"""

import gc
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial

from torch.profiler import record_function

from nanotrain.comm.device import Stopwatch, peak_memory
from nanotrain.comm.stop_point import PassStopped
from nanotrain.comm.work import CommunicationFault
from nanotrain.errors import CorruptState, NanotrainError
from nanotrain.log import get_logger
from nanotrain.runs.files import FolderVanished
from nanotrain.system import without_collection
from nanotrain.train.batches import GlobalBatch, StepSettings, raise_on_all
from nanotrain.train.hooks.hook import Hook, SkippedSteps
from nanotrain.train.resume.rollback import count_loss, leave_spike
from nanotrain.train.run import Run
from nanotrain.train.step import StepOutput, train_step_with_repeats
from nanotrain.train.step_report import (
    SlowestRank,
    SpikeScore,
    StepReport,
    Throughput,
    UnreadReports,
)

log = get_logger(__name__)


def fit(
    run: Run, hooks: Sequence[Hook], *, end: int | None = None, started: float | None = None
) -> bool:
    """Train until the last step or a reason to stop.

    Args:
        run: result of `build_run`.
        hooks: hooks in the order of calls; they are closed in reverse.
        end: first sample that another run trains on, built from the last checkpoint of this one;
            None: the run ends with its steps, or with its `stop.successor`.
        started: monotonic time from which `exit_duration_in_mins` counts; None: now.

    Returns:
        Whether that run follows.
    """
    loop = _Loop(run, [SkippedSteps(), *hooks], end=end, started=started)
    failed = True
    try:
        with (
            run.stop.on_signals(run.pipeline.stop_point),
            manual_gc(run.config.train.manual_gc_interval),
        ):
            loop.train()
        failed = False
    finally:
        with ExitStack() as closing:  # all are closed, also where one raises an error
            for hook in hooks:
                closing.callback(hook.close, failed=failed)
            # after a rank is lost the other reports may never be ready
            loop.call_after_read(loop.unread.take_ready())
    return loop.is_at_end


class _Loop:
    """The steps of `fit` and the state between two of them."""

    def __init__(
        self, run: Run, hooks: Sequence[Hook], *, end: int | None, started: float | None
    ) -> None:
        self.run = run
        self.hooks = hooks
        self.is_at_end = False  # whether the loop ended because another run follows
        self._end = end
        self.unread = UnreadReports()
        self._failure: NanotrainError | None = None  # error of this rank since the last step
        # before the last step: a signal to all ranks may reach some a step later
        self._had_save_request = False
        self._throughput_of = cache(partial(Throughput.of, run.plan, run.context))
        self._slowest = SlowestRank(run.context, logs_all=run.config.train.log_straggler)
        self._spikes = SpikeScore()
        self._watch = Stopwatch(run.context.device)  # times this step
        self._seq_length = run.config.data.seq_length  # sequence length of the last step
        self._data_stage: str | None = None  # data stage of the last step
        self._started = time.monotonic() if started is None else started
        self._first_step = run.state.step
        self._has_stepped = False  # whether this start has computed a step

    def train(self) -> None:
        """Take steps until the run ends; hooks are called around them."""
        run = self.run
        is_finished = self._is_finished()
        for hook in self._hooks_of(has_steps=not is_finished):
            hook.before_training(run)
        while not self._is_finished() and (batch := self._next_batch()) is not None:
            try:
                self._step(batch)
            except PassStopped as stopped:
                self._abandon_step(batch, stopped)
                break
        self.call_after_read(self.unread.take_all())
        with self._saving_after_error():
            raise_on_all(self._failure, run.context.control)
        run.wait_for_params()
        for hook in self._hooks_of(has_steps=self._has_stepped):
            if hook.runs_at_borders or not self.is_at_end:
                hook.after_training(run)

    def _hooks_of(self, *, has_steps: bool) -> list[Hook]:
        """The hooks to call where this start has steps, or has none."""
        return [hook for hook in self.hooks if has_steps or hook.runs_always]

    def call_after_read(self, reports: Sequence[StepReport]) -> None:
        """Pass reports to all hooks; their numbers can be read."""
        self._call_hooks(partial(_call_after_read, run=self.run, reports=reports))

    def _next_batch(self) -> GlobalBatch | None:
        """The next batch; None if the ranks stop. The hooks save first if a rank requested it."""
        run = self.run
        self._watch = Stopwatch(run.context.device)
        busy_s = self._slowest.begin()
        run.context.heartbeat.begin("data", step=run.state.step + 1)
        with self._saving_after_error():
            wants_save = run.stop.wants_save
            run.stop.wants_save = False
            batch = run.batch_iterator.next(
                wants_stop=self._wants_stop(),
                wants_save=wants_save,
                failure=self._failure,
                busy_s=busy_s,
            )
        if batch is None:
            log.info("stopping after step %d: %s", run.state.step, self._reason())
            return None
        if batch.wants_save and not self._had_save_request:
            log.info("saving after step %d: received SIGUSR1", run.state.step)
            # a run resumed from this checkpoint needs the rows before it
            self.call_after_read(self.unread.take_all())
            self._call_hooks(lambda hook: hook.save_now(run))
        self._had_save_request = batch.wants_save
        return batch

    def _step(self, batch: GlobalBatch) -> None:
        """Take one step, report it to the hooks, and roll back if its loss is a spike."""
        run = self.run
        # torch's own name for a step, in traces
        with record_function(f"ProfilerStep#{run.state.step + 1}"):
            run.context.heartbeat.begin("forward-backward")
            is_logged = self._is_logged(run.state.step + 1)
            output = train_step_with_repeats(run, batch, is_logged=is_logged)
            run.context.heartbeat.begin("hooks")
        self._watch.stop()
        if not self._has_stepped:
            self._has_stepped = True
            self._call_hooks(lambda hook: hook.begin_writing(run, step=self._first_step))
        self._log_changed_data(output.settings)
        report = self._report(output, batch)
        ready = self.unread.take(report)
        if not self._roll_back_spike(report):
            # Every hook gets the reports before the next hook, which may save: a run resumed from
            # there needs the rows.
            self._call_hooks(partial(_finish_step, run=run, report=report, ready=ready))
        interval = run.config.train.manual_gc_interval
        if interval and run.state.step % interval == 0:
            gc.collect()

    def _log_changed_data(self, settings: StepSettings) -> None:
        """Log the step that begins another sequence length or data stage."""
        step = self.run.state.step
        sample = self.run.state.consumed_samples - settings.num_samples
        length = settings.seq_length
        if length != self._seq_length:
            log.info("sequences of %s tokens from step %d on, sample %d", length, step, sample)
        self._seq_length = length
        stage = self.run.data_stage_at(sample)
        if stage != self._data_stage:
            log.info("data stage %s from step %d on, sample %d", stage, step, sample)
        self._data_stage = stage

    def _report(self, output: StepOutput, batch: GlobalBatch) -> StepReport:
        """The report of a step; numbers on the device are read later."""
        run = self.run
        state = run.state
        settings = output.settings
        report = StepReport(
            step=state.step,
            output=output,
            stopwatch=self._watch,
            data_wait_s=batch.wait_s,
            throughput=self._throughput_of(seq_length=settings.seq_length),
            lr=settings.rates["lr"],
            peak_memory_bytes=peak_memory(run.context.device),
            global_batch_size=settings.num_samples,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            is_logged=self._is_logged(state.step),
            decoupled_lr=settings.rates["decoupled_lr"],
            spikes=self._spikes,
            data_stage=self._data_stage,
            seq_length=None if run.plan.sampler.lengths is None else settings.seq_length,
            save_stall_s=run.checkpointer.take_stall_s() or None,
            failed_saves=run.checkpointer.num_failed or None,
        )
        if batch.busy_s:
            self._slowest.finish(report, batch.busy_s)
        return report

    def _roll_back_spike(self, report: StepReport) -> bool:
        """Go back to a checkpoint if the loss of the step is a spike; returns whether it did."""
        run = self.run
        factor = run.config.train.rollback_on_spike
        if factor is None or not count_loss(run.state, report.output.loss, factor=factor):
            return False
        self._call_hooks(lambda hook: hook.before_rollback(run))
        is_back = leave_spike(run, report.output.loss)
        if is_back:
            self._call_hooks(lambda hook: hook.after_rollback(run, report))
        return is_back

    def _call_hooks(self, call: Callable[[Hook], None]) -> None:
        """Call every hook; all ranks raise the first error of this rank before the next step.

        An error that all ranks raise together is raised at once: nothing may save a corrupt state.
        """
        for hook in self.hooks:
            try:
                call(hook)
            except (CommunicationFault, CorruptState):
                raise
            except NanotrainError as error:
                self._failure = self._failure or error

    @contextmanager
    def _saving_after_error(self) -> Iterator[None]:
        """Let the hooks save before an error that all ranks raise in the block propagates."""
        try:
            yield
        except (CommunicationFault, FolderVanished, CorruptState):
            raise
        except NanotrainError:
            self.run.wait_for_params()
            self.call_after_read(self.unread.take_all())
            for hook in self.hooks:
                hook.after_failure(self.run)
            raise

    def _abandon_step(self, batch: GlobalBatch, stopped: PassStopped) -> None:
        """Log the stop and drop the batch read ahead; state and data stay at the last full step."""
        step = self.run.state.step
        self.run.batch_iterator.discard()
        log.info(
            "stopping after step %d: %s; step %d is abandoned after %d of %d microbatches",
            step,
            self._reason(),
            step + 1,
            stopped.num_microbatches,
            len(batch.microbatches),
        )

    def _is_logged(self, step: int) -> bool:
        """Whether the host waits for this step, for a log line or a hook that needs its numbers."""
        train = self.run.config.train
        if train.rollback_on_spike is not None:  # needs the loss of every step
            return True
        intervals = (
            train.log_interval,
            train.eval_interval,
            train.report_interval,
            self.run.config.checkpoint.save_interval,
        )
        is_due = any(interval and step % interval == 0 for interval in intervals)
        if is_due or step == train.train_iters:
            return True
        return any(hook.needs_numbers(self.run, step) for hook in self.hooks)

    def _is_finished(self) -> bool:
        """Whether the run ends here: by its steps, an interval, or for a successor."""
        train = self.run.config.train
        step = self.run.state.step
        if step >= train.train_iters:
            return True
        if train.exit_interval and step != self._first_step and step % train.exit_interval == 0:
            log.info("stopping after step %d: --exit-interval %d", step, train.exit_interval)
            return True
        is_past = self._end is not None and self.run.state.consumed_samples >= self._end
        self.is_at_end = is_past or self.run.stop.successor is not None
        return self.is_at_end

    def _wants_stop(self) -> bool:
        """Whether this rank received a signal or reached the time limit."""
        if self.run.inputs.is_unsaved and not self._has_stepped:
            return False  # hooks save the state once there was a step
        if self.run.stop:
            return True
        limit = self.run.config.train.exit_duration_in_mins
        return limit is not None and time.monotonic() - self._started >= limit * 60

    def _reason(self) -> str:
        if self.run.stop.signal is not None:
            return f"received {signal.Signals(self.run.stop.signal).name}"
        return "--exit-duration-in-mins reached" if self._wants_stop() else "another rank stops"


def _call_after_read(hook: Hook, run: Run, *, reports: Sequence[StepReport]) -> None:
    for report in reports:
        hook.after_read(run, report)


def _finish_step(hook: Hook, run: Run, *, report: StepReport, ready: Sequence[StepReport]) -> None:
    hook.after_step(run, report)
    _call_after_read(hook, run, reports=ready)


@contextmanager
def manual_gc(interval: int) -> Iterator[None]:
    """Disable automatic garbage collection if `fit` collects, on all ranks at the same step."""
    if not interval:
        yield
        return
    gc.collect()
    with without_collection():
        yield
