"""The loop: the order of calls, every reason to stop, and what is closed after an error."""

import gc
import shutil
import signal
import time
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest

from nanotrain.checkpoint.store import complete_checkpoints
from nanotrain.comm.collectives import all_gather_object, barrier
from nanotrain.comm.heartbeat import Heartbeat
from nanotrain.errors import EnvironmentFault, TrainingFault
from nanotrain.runs.files import FolderVanished
from nanotrain.train import fit as fit_module
from nanotrain.train.fit import fit, manual_gc
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.hooks.log import LogHook
from tests.harness import ranks
from tests.train.small_run import Failing, Spy, small_run, train


class Signalling(Hook):
    """Sends signals to this process after a step."""

    def __init__(self, step: int, *numbers: signal.Signals) -> None:
        self.step, self.numbers = step, numbers

    def after_step(self, run, report) -> None:
        if report.step == self.step:
            for number in self.numbers:
                signal.raise_signal(number)  # in this thread, so that two are not merged


def handlers() -> list:
    return [
        signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    ]


def test_hooks_are_called_around_the_steps(tmp_path):
    spy = Spy()
    with small_run(tmp_path, "--train-iters", "2") as run:
        train(run, spy)
    assert spy.calls == ["before", "step 1", "step 2", "after", "closed"]
    assert [report.consumed_samples for report in spy.reports] == [1, 2]


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_run_with_nothing_left_takes_no_step(tmp_path, steps_before):
    with small_run(tmp_path, "--train-iters", str(steps_before)) as run:
        train(run, CheckpointHook())
    spy = Spy()
    with small_run(tmp_path, "--train-iters", "0") as run:
        train(run, spy)
        assert run.state.step == steps_before
    assert spy.calls == ["closed"], "it writes nothing, so no hook is called"


def test_exit_interval_ends_the_run_at_its_multiples_one_after_the_other(tmp_path, logged):
    reached = []
    for _ in range(3):  # the same command again and again, resuming
        with small_run(tmp_path, "--train-iters", "8", "--exit-interval", "3") as run:
            train(run, CheckpointHook())
            reached.append(run.state.step)
    assert reached == [3, 6, 8]
    assert "stopping after step 3: --exit-interval 3" in logged


def test_the_time_limit_ends_the_run_with_a_checkpoint(tmp_path, logged, monkeypatch):
    # A clock that goes on by a second with every look: at the start, and once before each step.
    monkeypatch.setattr(fit_module, "time", SimpleNamespace(monotonic=partial(next, count())))
    with small_run(tmp_path, "--train-iters", "1000", "--exit-duration-in-mins", "0.05") as run:
        train(run, CheckpointHook())
        assert run.state.step == 2
        assert run.checkpointer.latest().name == "step-00000002"
    assert any("--exit-duration-in-mins reached" in line for line in logged)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_the_step_and_saves(tmp_path, logged, number):
    spy, before = Spy(), handlers()
    with small_run(tmp_path, "--train-iters", "9") as run:
        train(run, Signalling(2, number), CheckpointHook(), spy)
        assert run.checkpointer.latest().name == "step-00000002"
    assert spy.calls == ["before", "step 1", "step 2", "after", "closed"]
    assert f"stopping after step 2: received {number.name}" in logged
    assert handlers() == before


def test_a_second_sigterm_does_not_keep_the_run_from_saving(tmp_path):
    # A scheduler sends one to every process, and torchrun one more to its ranks.
    with small_run(tmp_path, "--train-iters", "9") as run:
        train(run, Signalling(2, signal.SIGTERM, signal.SIGTERM, signal.SIGINT), CheckpointHook())
        assert run.checkpointer.latest().name == "step-00000002"


def test_a_second_interrupt_ends_the_run_at_once(tmp_path):
    # a shell starts jobs in the background without it
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    spy, before = Spy(), handlers()
    with small_run(tmp_path, "--train-iters", "9") as run, pytest.raises(KeyboardInterrupt):
        train(run, Signalling(2, signal.SIGINT, signal.SIGINT), spy)
    assert spy.calls == ["before", "step 1", "closed after an error"]
    assert handlers() == before
    signal.signal(signal.SIGINT, ours)


def test_sigusr1_saves_and_training_goes_on(tmp_path, logged):
    spy, before = Spy(), handlers()
    with small_run(tmp_path, "--train-iters", "5", "--keep-last", "0") as run:
        # A signal that is sent to all ranks may reach some of them a step later.
        train(
            run, Signalling(2, signal.SIGUSR1), Signalling(3, signal.SIGUSR1), CheckpointHook(), spy
        )
        assert [path.name for path in complete_checkpoints(run.checkpointer.folder)] == [
            "step-00000002",
            "step-00000005",
        ]
    assert spy.calls[-3:] == ["step 5", "after", "closed"]
    assert sum("received SIGUSR1" in line for line in logged) == 1
    assert handlers() == before


@ranks(2, threads=False)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(ctx, tmp_path):
    spy = Spy()
    with small_run(tmp_path, "--train-iters", "9", context=ctx) as run:
        train(
            run, *([Signalling(3, signal.SIGTERM)] if ctx.rank == 1 else []), CheckpointHook(), spy
        )
        stopped = all_gather_object(run.state.step, ctx.control)
        # Python runs a signal handler between two instructions of its own, on a busy machine one
        # step later.
        assert stopped in ([3, 3], [4, 4])
        assert run.checkpointer.latest().name == f"step-{stopped[0]:08d}"
    assert spy.calls[-2:] == ["after", "closed"]


def test_an_error_closes_every_hook_and_is_passed_on(tmp_path):
    first, last, before = Spy(), Spy(), handlers()
    with (
        small_run(tmp_path, "--train-iters", "5") as run,
        pytest.raises(RuntimeError, match="a hook broke"),
    ):
        train(run, first, Failing(2), last)
    assert first.calls == ["before", "step 1", "step 2", "closed after an error"]
    assert last.calls == ["before", "step 1", "closed after an error"]
    assert handlers() == before


def test_an_error_of_a_hook_that_is_closed_closes_the_others(tmp_path):
    class Unclosable(Hook):
        def close(self, *, failed: bool) -> None:
            raise InterruptedError("while it waits")

    first, last = Spy(), Spy()
    with small_run(tmp_path, "--train-iters", "1") as run, pytest.raises(InterruptedError):
        train(run, first, Unclosable(), last)
    assert first.calls[-1] == last.calls[-1] == "closed"


def test_garbage_is_collected_at_agreed_steps_only(tmp_path, monkeypatch):
    collected, was_enabled = [], []

    class Watch(Hook):
        def after_step(self, run, report) -> None:
            was_enabled.append(gc.isenabled())

    with small_run(tmp_path, "--train-iters", "5", "--manual-gc-interval", "2") as run:
        monkeypatch.setattr(gc, "collect", lambda: collected.append(run.state.step))
        fit(run, [Watch()])
    assert collected == [0, 2, 4] and was_enabled == [False] * 5
    assert gc.isenabled()


def test_without_an_interval_garbage_is_left_to_python():
    with manual_gc(0):
        assert gc.isenabled()


class Faulty(Hook):
    """A hook with an error of the machine after a step, as a full disk."""

    def __init__(self, step: int, error: EnvironmentFault) -> None:
        self.step, self.error = step, error

    def after_step(self, run, report) -> None:
        if report.step == self.step:
            raise self.error


@pytest.mark.parametrize("train_iters", ["2", "9"])  # it fails in the last step, or before others
def test_an_error_of_the_machine_is_raised_after_saving_the_last_step(tmp_path, train_iters):
    spy, fault = Spy(), EnvironmentFault("metrics.jsonl cannot be written")
    with small_run(tmp_path, "--train-iters", train_iters) as run:
        with pytest.raises(EnvironmentFault, match=r"metrics.jsonl cannot"):
            train(run, Faulty(2, fault), CheckpointHook(), spy)
        assert run.checkpointer.latest().name == "step-00000002"
    assert spy.calls == ["before", "step 1", "step 2", "closed after an error"]


def test_nothing_is_saved_into_a_folder_that_vanished(tmp_path):
    with small_run(tmp_path / "run", "--train-iters", "9") as run:
        with pytest.raises(FolderVanished):
            train(run, Removing(2), LogHook(), CheckpointHook())
        assert not (tmp_path / "run").exists()


class Removing(Hook):
    """Removes the run folder after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run, report) -> None:
        if report.step == self.step:
            shutil.rmtree(run.folder.path)


@ranks(2)
def test_an_error_of_one_ranks_hook_is_raised_on_all_with_the_state_saved(ctx, tmp_path):
    hooks = [Faulty(3, EnvironmentFault("the disk is full"))] if ctx.rank == 0 else []
    with small_run(tmp_path, "--train-iters", "9", context=ctx) as run:
        with pytest.raises(EnvironmentFault, match="the disk is full"):
            train(run, *hooks, CheckpointHook())
        assert run.checkpointer.latest().name == "step-00000003"


class Poison(Hook):
    """Makes every loss of this rank from a step on a NaN."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_training(self, run) -> None:
        (stage,) = run.stages.values()
        stage.register_forward_hook(
            lambda _, __, loss: loss * float("nan") if run.state.step + 1 >= self.step else loss
        )


@ranks(2)
def test_too_many_skipped_steps_in_a_row_end_the_run_with_the_state_saved(ctx, tmp_path):
    hooks = [Poison(3)] if ctx.rank == 1 else []
    flags = ("--train-iters", "9", "--max-consecutive-skips", "2", "--log-interval", "1")
    spy = Spy()
    with small_run(tmp_path, *flags, context=ctx) as run:
        with pytest.raises(
            TrainingFault, match="2 steps in a row without an update, the last is step 4"
        ) as error:
            train(run, *hooks, CheckpointHook(), spy)
        assert [report.skipped_on for report in spy.reports] == [None, None, "rank 1", "rank 1"]
        assert error.value.why == "their gradients are not finite on rank 1"
        assert run.checkpointer.latest().name == "step-00000004"


def test_fp16_at_its_minimal_scale_says_so(tmp_path, logged):
    flags = ("--fp16", "--initial-loss-scale", "2", "--min-loss-scale", "1", "--hysteresis", "1")
    with small_run(tmp_path, "--train-iters", "9", "--max-consecutive-skips", "4", *flags) as run:
        with pytest.raises(TrainingFault, match="at the minimal loss scale 1"):
            train(run, Poison(2))
        assert run.state.step == 5


class Slow(Hook):
    """Makes the forward of this rank take 0.2 s longer than the other rank, a thread of this
    process, takes.
    """

    other: Heartbeat

    def before_training(self, run) -> None:
        (stage,) = run.stages.values()
        stage.register_forward_hook(lambda *_: self.wait())

    def wait(self) -> None:
        while (beat := self.other.read()).phase in (
            "start",
            "data",
            "hooks",
        ) or beat.waiting is None:
            time.sleep(0.005)
        time.sleep(0.25)


@ranks(2)
def test_the_slowest_rank_is_reported(ctx, tmp_path):
    if ctx.rank == 0:
        Slow.other = ctx.heartbeat
    barrier(ctx.control)
    spy, batches = Spy(), []
    with small_run(tmp_path, "--train-iters", "4", "--log-straggler", context=ctx) as run:
        read = run.batch_iterator.next
        run.batch_iterator.next = lambda **given: batches.append(read(**given)) or batches[-1]
        train(run, *([Slow()] if ctx.rank == 1 else []), spy)
    busy_s = [batch.busy_s for batch in batches[1:]]  # of the steps before
    assert all(each[1] >= 0.2 for each in busy_s)
    if ctx.rank == 0:
        steps_s = [report.step_time_s for report in spy.reports]
        assert all(
            each[0] <= step_s - 0.1 for each, step_s in zip(busy_s, steps_s, strict=False)
        ), "waiting is not busy"
    assert [report.busy_s for report in spy.reports] == [None, *busy_s]
    assert [report.slowest_rank for report in spy.reports] == [
        None,
        *(each.index(max(each)) for each in busy_s),
    ]
    assert all(0 < report.wait_for_slowest <= 1.0 for report in spy.reports[1:])
