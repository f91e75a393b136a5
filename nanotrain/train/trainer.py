"""The training loop: next batch, train step, report, hooks.

A run stops between two steps, on all ranks together: after the last step, at `exit_interval`, after
`exit_duration_in_mins`, on SIGTERM, SIGINT or SIGHUP. The clock or signal of one rank stops all through the all-reduce
before the next step. A signal during a long step stops all ranks before the same microbatch (`comm/stop_point.py`), and
the step is abandoned. The hooks then save and the process exits with 0. SIGUSR1 to one rank saves and goes on.

An error of one rank's hook or data is raised on all ranks before the next step; the hooks save the last step
before that. Hooks are closed after an error too.
"""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from types import FrameType

from torch.profiler import record_function

from nanotrain.comm.device import Stopwatch, peak_memory
from nanotrain.comm.stop_point import PassStopped
from nanotrain.comm.work import CommunicationFault
from nanotrain.errors import CorruptState, NanotrainError, TrainingFault
from nanotrain.log import get_logger
from nanotrain.quantities import count_of
from nanotrain.runs.files import FolderVanished
from nanotrain.system.process import stop_signals
from nanotrain.train.batches import GlobalBatch, raise_on_all
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.metrics.spikes import SpikeScore
from nanotrain.train.metrics.step_report import StepReport, Throughput, UnreadReports
from nanotrain.train.resume.rollback import checkpoint_before_spike, count_loss, roll_back
from nanotrain.train.run import Run
from nanotrain.train.step import StepOutput, train_step

log = get_logger(__name__)


class Trainer:
    """Runs the training loop.

    Args:
        run: built by `build_run`.
        hooks: called in this order; closed in reverse.
    """

    def __init__(self, run: Run, hooks: Sequence[Hook]) -> None:
        self.run, self.hooks = run, hooks
        self._throughput = Throughput.of(run.plan, run.context)
        self._failure: NanotrainError | None = None  # of this rank since the last step
        self._waited_before_s = self._busy_s = self._step_time_s = 0.0  # of the last step
        self._unread = UnreadReports()
        self._spikes = SpikeScore()
        self._skips = 0  # steps skipped in a row
        self._stage: str | None = None  # the data stage of the last step
        self._seq_length = run.config.data.seq_length  # of the last step
        self._started = time.monotonic()
        self._first_step = run.state.step

    def fit(self) -> None:
        """Train until the last step or a reason to stop."""
        failed = True
        try:
            with self._stopping_on_signals(), manual_gc(self.run.config.train.manual_gc_interval):
                self._run_steps()
            failed = False
        finally:
            for hook in reversed(self.hooks):
                hook.close(failed=failed)

    def _run_steps(self) -> None:
        run = self.run
        for hook in self.hooks:
            hook.before_training(run)
        had_request = False  # a signal sent to all ranks may reach some of them a step later
        while not self._is_finished() and (batch := self._next_batch()) is not None:
            if batch[0].wants_save and not had_request:
                self._save_now()
            had_request = batch[0].wants_save
            try:
                self._run_step(*batch)
            except PassStopped as stopped:
                self._abandon_step(batch[0], stopped)
                break
        with self._saving_after_error():
            raise_on_all(self._failure, run.context.control)
        for dp in run.data_parallel:
            dp.wait_for_params()
        for hook in self.hooks:
            hook.after_training(run)

    def _abandon_step(self, batch: GlobalBatch, stopped: PassStopped) -> None:
        """Log the stop and drop the batch that was read ahead; state and data position stay at the last full step."""
        self.run.batch_iterator.discard()
        log.info(
            "stopping after step %d: %s; step %d is abandoned after %d of %d microbatches",
            self.run.state.step,
            self._reason(),
            self.run.state.step + 1,
            stopped.num_microbatches,
            len(batch.microbatches),
        )

    @contextmanager
    def _saving_after_error(self) -> Iterator[None]:
        """If all ranks raise an error in the block, let the hooks save before it propagates."""
        try:
            yield
        except CommunicationFault:
            raise
        except NanotrainError as error:
            if not isinstance(error, FolderVanished | CorruptState):
                for dp in self.run.data_parallel:
                    dp.wait_for_params()
                for hook in self.hooks:
                    hook.after_failure(self.run)
            raise

    def _next_batch(self) -> tuple[GlobalBatch, Stopwatch] | None:
        """The next batch and a watch started when it was requested; None if the ranks stop instead."""
        run, watch = self.run, Stopwatch(self.run.context.device)
        self._waited_before_s = run.context.heartbeat.waited_s
        run.context.heartbeat.begin("data", step=run.state.step + 1)
        # measured on CPUs only: on a GPU the device waits, not the host
        busy_s = self._busy_s if run.context.device.type == "cpu" else None
        with self._saving_after_error():
            wants_save, run.stop.wants_save = run.stop.wants_save, False
            batch = run.batch_iterator.next(
                wants_stop=self._wants_stop(), wants_save=wants_save, failure=self._failure, busy_s=busy_s
            )
        if batch is None:
            log.info("stopping after step %d: %s", run.state.step, self._reason())
            return None
        return batch, watch

    def _save_now(self) -> None:
        """Let the hooks save the last step. An error of a hook is raised on all ranks after the next step."""
        log.info("saving after step %d: received SIGUSR1", self.run.state.step)
        self._call_hooks(lambda hook: hook.save_now(self.run))

    def _call_hooks(self, call: Callable[[Hook], None]) -> None:
        """Call every hook; an error of this rank or of all is raised on all ranks before the next step."""
        for hook in self.hooks:
            try:
                call(hook)
            except CommunicationFault:
                raise
            except CorruptState:  # raised by all ranks at once: nothing may save this state
                raise
            except NanotrainError as error:
                self._failure = self._failure or error

    def _run_step(self, batch: GlobalBatch, watch: Stopwatch) -> None:
        run = self.run
        run.context.heartbeat.begin("step")
        with record_function(f"ProfilerStep#{run.state.step + 1}"):  # torch's own name for a step, in traces
            is_logged = self._is_logged(run.state.step + 1)
            output = train_step(run, batch, is_logged=is_logged)
        watch.stop()
        run.context.heartbeat.begin("hooks")
        report = self._report(output, watch, data_wait_s=batch.wait_s)
        for readable in self._unread.take(report):
            self._count_skips(readable)
        if batch.busy_s:
            self._report_slowest(report, batch.busy_s)
        report.save_stall_s = run.checkpointer.take_stall_s() or None
        report.failed_saves = run.checkpointer.num_failed or None
        if not self._rolled_back(report):
            self._call_hooks(lambda hook: hook.after_step(run, report))
        interval = run.config.train.manual_gc_interval
        if interval and run.state.step % interval == 0:
            gc.collect()

    def _rolled_back(self, report: StepReport) -> bool:
        """Go back to a checkpoint if the loss of the step is a spike; returns whether it did."""
        run, factor = self.run, self.run.config.train.rollback_on_spike
        if factor is None or not count_loss(run.state, report.loss, factor=factor):
            return False
        self._call_hooks(lambda hook: hook.before_rollback(run))
        checkpoint = checkpoint_before_spike(run)
        usual = median(run.state.recent_losses)
        spike = f"step {report.step}: the loss {report.loss:.4f} is {report.loss / usual:.2f} times its median"
        is_first = run.context.control.is_first  # the others know the same
        if checkpoint is None:
            if is_first:
                log.warning("%s; there is no checkpoint to go back to", spike)
            return False
        roll_back(run, checkpoint)
        if is_first:
            state = run.state
            log.warning("%s; back to step %d, %d samples skipped so far", spike, state.step, state.skipped_samples)
        self._call_hooks(lambda hook: hook.after_rollback(run, report))
        return True

    def _report(self, output: StepOutput, watch: Stopwatch, *, data_wait_s: float) -> StepReport:
        state = self.run.state
        first_sample = state.consumed_samples - output.num_samples
        seq_length = self._scheduled_length(first_sample)
        return StepReport(
            step=state.step,
            output=output,
            stopwatch=watch,
            data_wait_s=data_wait_s,
            throughput=self._throughput,
            lr=output.lr,
            peak_memory_bytes=peak_memory(self.run.context.device),
            global_batch_size=output.num_samples,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            is_logged=self._is_logged(state.step),
            decoupled_lr=output.decoupled_lr,
            spikes=self._spikes,
            data_stage=self._data_stage(first_sample),
            seq_length=seq_length,
        )

    def _scheduled_length(self, consumed_samples: int) -> int | None:
        """The sequence length of the batch that starts there; a change is logged. None without a schedule."""
        plan, length = self.run.plan, self.run.plan.seq_length_at(consumed_samples)
        if length != self._seq_length:
            log.info("sequences of %d tokens from step %d on, sample %d", length, self.run.state.step, consumed_samples)
            self._seq_length, self._throughput = length, self._throughput.of_length(plan, length)
        return None if plan.sampler.lengths is None else length

    def _data_stage(self, consumed_samples: int) -> str | None:
        """The data stage of the batch that starts there; a change is logged."""
        name = self.run.data_stage_at(consumed_samples)
        if name != self._stage:
            log.info("data stage %s from step %d on, sample %d", name, self.run.state.step, consumed_samples)
        self._stage = name
        return name

    def _is_logged(self, step: int) -> bool:
        """Whether the host waits for this step: to write a log line, or because a hook needs its numbers anyway."""
        train, checkpoint = self.run.config.train, self.run.config.checkpoint
        intervals = (train.log_interval, train.eval_interval, train.report_interval, checkpoint.save_interval)
        if train.rollback_on_spike is not None:  # needs the loss of every step
            return True
        return step == train.train_iters or any(each and step % each == 0 for each in intervals)

    def _report_slowest(self, report: StepReport, busy_s: Sequence[float]) -> None:
        """Report the slowest rank of the previous step, and keep this step's busy time for the next report."""
        step_time_s = report.step_time_s
        if len(busy_s) > 1 and self._step_time_s:
            slowest = max(range(len(busy_s)), key=busy_s.__getitem__)
            others_s = (sum(busy_s) - busy_s[slowest]) / (len(busy_s) - 1)
            report.slowest_rank = slowest
            report.wait_for_slowest = min(1.0, (busy_s[slowest] - others_s) / self._step_time_s)
        waited_s = self.run.context.heartbeat.waited_s - self._waited_before_s
        self._busy_s, self._step_time_s = max(0.0, step_time_s - waited_s), step_time_s

    def _count_skips(self, report: StepReport) -> None:
        """Count consecutive skipped steps; at `--max-consecutive-skips` all ranks fail."""
        train, scaling = self.run.config.train, self.run.optimizer.loss_scale
        is_skipped, loss_scale = report.skipped, report.loss_scale
        self._skips = self._skips + 1 if is_skipped else 0
        at_minimum = scaling.is_dynamic and loss_scale <= scaling.minimum
        if is_skipped and at_minimum and self._skips == 1 and self.run.context.control.is_first:
            log.warning(
                "step %d overflows at the minimal loss scale %g: no scale makes it finite",
                report.step,
                loss_scale,
            )
        if self._skips and self._skips == train.max_consecutive_skips:
            self._failure = TrainingFault(
                f"{count_of(self._skips, 'step')} in a row without an update, the last is step {report.step}",
                why="their gradients are not finite" + (f", at the minimal loss scale {loss_scale:g}" * at_minimum),
                fix="find the first tensor with --debug-nan, lower --lr, or raise --max-consecutive-skips",
            )

    def _is_finished(self) -> bool:
        train, step = self.run.config.train, self.run.state.step
        if step >= train.train_iters:
            return True
        if not train.exit_interval or step == self._first_step or step % train.exit_interval:
            return False
        log.info("stopping after step %d: --exit-interval %d", step, train.exit_interval)
        return True

    def _wants_stop(self) -> bool:
        limit = self.run.config.train.exit_duration_in_mins
        return bool(self.run.stop) or (limit is not None and time.monotonic() - self._started >= limit * 60)

    def _reason(self) -> str:
        if self.run.stop.signal is not None:
            return f"received {signal.Signals(self.run.stop.signal).name}"
        return "--exit-duration-in-mins reached" if self._wants_stop() else "another rank stops"

    @contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        """SIGTERM, SIGHUP or SIGINT ends the run, a second SIGINT (Ctrl-C) at once; SIGUSR1 saves.

        A second SIGTERM is ignored: schedulers send one to every process, and torchrun sends another to its ranks.
        Only the main thread can handle signals; in any other thread the handlers stay as they are.
        """
        in_main = threading.current_thread() is threading.main_thread()
        numbers = (*stop_signals(), signal.SIGUSR1) if in_main else ()
        before = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}

        def on_signal(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGUSR1:
                self.run.stop.wants_save = True
                return
            self.run.stop.signal = number
            if number == signal.SIGINT:
                signal.signal(number, before[signal.SIGINT])

        for number in before:
            signal.signal(number, on_signal)
        stop_point = self.run.pipeline.stop_point
        try:
            if stop_point is not None:
                stop_point.start(lambda: bool(self.run.stop))
            yield
        finally:
            if stop_point is not None:
                stop_point.end()
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def manual_gc(interval: int) -> Iterator[None]:
    """Disable automatic garbage collection; the trainer collects on all ranks at the same step, so none waits alone."""
    if not interval:
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
