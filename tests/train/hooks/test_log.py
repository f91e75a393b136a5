"""The console and metrics.jsonl."""

import json
import re
from types import SimpleNamespace

import pytest

from nanotrain.comm.heartbeat import Heartbeat
from nanotrain.config.load import configure
from nanotrain.train.evaluate import EvaluateHook
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.hooks.log import LogHook, _Phase, describe
from tests.harness import ranks
from tests.train.small_run import Failing, KnownTime, metrics_of, report_of, small_run, train


def lines_of(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]


def steps_of(lines: list[str]) -> list[str]:
    return [line.split(" | ")[0] for line in lines]


def test_outside_a_terminal_no_rank_ends_with_the_empty_line_of_a_progress_bar(capsys):
    LogHook().close(failed=False)
    assert capsys.readouterr().out == ""


MOE = {"max_load": 2.25, "dropped": 0.031}
LINES = {
    200: "step  5/12 | loss  2.5000 | grad   0.750 | lr 1.00e-03 | experts   2.25x,  3.1% dropped |     1,000 tok/s | "
    "      250 per device | mfu 41.5% | mem   2.00 GB | data wait  10% | eta   0:00:04",
    140: "step  5/12 | loss  2.5000 | grad   0.750 | lr 1.00e-03 |     1,000 tok/s | mfu 41.5% | mem   2.00 GB | "
    "data wait  10% | eta   0:00:04",
    100: "step  5/12 | loss  2.5000 | grad   0.750 | lr 1.00e-03 |     1,000 tok/s | mfu 41.5% | eta   0:00:04",
    80: "step  5/12 | loss  2.5000 |     1,000 tok/s | mfu 41.5% | eta   0:00:04",
}


@pytest.mark.parametrize("width", LINES)
def test_a_line_says_everything_once_and_the_important_parts_on_a_narrow_terminal(width):
    report = report_of(5, mfu=0.415, metrics={"moe": MOE})
    assert describe([report], train_iters=12, num_devices=4, width=width) == LINES[width]


def columns_of(line: str) -> list[tuple[int, str]]:
    """Where the columns of a step line begin, and their names."""
    cells = line.splitlines()[0].split(" | ")
    starts = [sum(len(cell) + 3 for cell in cells[:number]) for number in range(len(cells))]
    return [
        (start, re.sub(r"[\d.,/%:e+-]+", "", cell).strip())
        for start, cell in zip(starts, cells, strict=True)
    ]


@pytest.mark.parametrize("width", range(60, 161, 10))
def test_the_columns_are_the_same_from_line_to_line_whatever_happens(width):
    """Memory, waits, stalls, skips and validations move no column."""
    calm = {"mfu": 0.4, "metrics": {"moe": {"max_load": 1.0, "dropped": 0.0}}}
    busy = {
        "mfu": 0.09,
        "metrics": {"moe": MOE},
        "loss": 11.25,
        "grad_norm": 123.4,
        "lr": 0.0,
        "data_wait_s": 0.5,
    }
    busy |= {
        "valid_loss": 2.0,
        "save_stall_s": 3.0,
        "skipped": True,
        "slowest_rank": 7,
        "wait_for_slowest": 0.9,
    }
    lines = [
        describe([report_of(7, **calm)], train_iters=12_000, num_devices=4, width=width),
        describe([report_of(9_999, **busy)], train_iters=12_000, num_devices=4, width=width),
        describe(
            [report_of(12_000, **calm, tokens_per_second=2e6)],
            train_iters=12_000,
            num_devices=4,
            width=width,
        ),
        describe(
            [report_of(8, **calm)],
            train_iters=12_000,
            num_devices=4,
            width=width,
            seconds_per_step=99.0,
        ),
    ]
    assert len({tuple(columns_of(line)) for line in lines}) == 1
    assert len(lines[1].splitlines()) == 2


def test_a_part_that_does_not_fit_makes_room_for_shorter_ones():
    report = report_of(5, metrics={"mtp_losses": [2.0] * 8}, data_wait_s=0.0)
    line = describe([report], train_iters=9, num_devices=1, width=125)
    assert "mtp" not in line and "data wait   0%" in line and len(line) <= 125


def test_a_line_names_the_rank_that_the_others_wait_for_only_where_the_wait_is_notable():
    slow = [report_of(step, slowest_rank=3, wait_for_slowest=0.18) for step in (4, 5)]
    faster_rank = report_of(6, slowest_rank=1, wait_for_slowest=0.9)
    assert "wait for rank 3 18%" in describe(slow, train_iters=9, num_devices=4)
    assert "wait for rank 3 12%" in describe(
        [*slow, faster_rank], train_iters=9, num_devices=4
    )  # a third of the steps without
    even = report_of(5, slowest_rank=3, wait_for_slowest=0.09)
    assert "wait for" not in describe([even], train_iters=9, num_devices=4)


def test_a_line_names_the_fastest_and_the_slowest_rank_if_asked():
    reports = [
        report_of(5),
        report_of(6, busy_s=[0.2, 0.1, 0.3]),
        report_of(7, busy_s=[0.3, 0.3, 0.4]),
    ]
    line = describe(reports, train_iters=9, num_devices=3, width=60)
    assert "busy 0.200 s (rank 1) to 0.350 s (rank 2)" in line
    assert "busy" not in describe([report_of(5)], train_iters=9, num_devices=3)


def test_the_remaining_time_counts_what_lies_between_steps():
    line = describe([report_of(5)], train_iters=9, num_devices=1, seconds_per_step=10.0)
    assert line.endswith("eta   0:00:40") and "per device" not in line


def test_rates_are_means_over_the_steps_since_the_last_line():
    # Given a slow step and a fast one, 500 tokens each,
    slow = report_of(1, step_time_s=4.0, tokens_per_second=125.0, data_wait_s=1.0)
    fast = report_of(2, step_time_s=1.0, tokens_per_second=500.0, data_wait_s=0.0)
    line = describe([slow, fast], train_iters=12, num_devices=1)
    # then 1000 tokens took 5 s, of which 1 s was waiting, and ten more steps take 25 s.
    assert " 200 tok/s" in line and "data wait  20%" in line and line.endswith("eta   0:00:25")


def test_a_run_of_days_counts_hours():
    line = describe([report_of(1)], train_iters=100_001, num_devices=1, seconds_per_step=3.6)
    assert line.endswith("eta 100:00:00")


def test_what_happened_is_a_line_of_its_own():
    second = report_of(
        2,
        valid_loss=2.0,
        save_stall_s=1.0,
        skipped_on="rank 1",
        evaluation={"task/copy/accuracy": 0.5},
    )
    reports = [report_of(1, skipped=True, save_stall_s=0.5), second]
    lines = describe(reports, train_iters=2, num_devices=1, width=60).splitlines()
    assert (
        lines[1]
        == "  valid 2.0000 (ppl 7.4) | copy 50.0% | SKIPPED 1 (gradients not finite on rank 1) | save stall 1.50 s"
    )
    assert len(lines) == 2


def test_the_times_of_phases_are_means_per_step_in_columns():
    once = [
        ("data", KnownTime(0.25)),
        ("F", KnownTime(0.5)),
        ("F", KnownTime(1.0)),
        ("forward-backward", KnownTime(2)),
    ]
    reports = [
        report_of(1, phases=once),
        report_of(2, phases=[*once, ("checkpoint", KnownTime(3.0))]),
    ]
    line = describe(reports, train_iters=2, num_devices=1).splitlines()[-1]
    names = [
        "data",
        "forward-backward",
        "grad-reduce",
        "optimizer",
        "param-gather",
        "hooks",
        "validation",
    ]
    assert re.findall(r"([\w-]+) +([\d.,]+)(?: \||$)", line) == [
        *zip(names, ["250.0", "2,000.0", *["0.0"] * 5], strict=True),
        ("checkpoint", "1,500.0"),
        ("F", "1,500.0"),
    ]


def test_every_step_is_in_the_metrics_and_every_logged_one_on_the_console(tmp_path, capsys):
    with small_run(tmp_path, "--train-iters", "5", "--log-interval", "2") as run:
        train(run, LogHook())
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4, 5]
    assert steps_of(lines_of(capsys)) == ["step 2/5", "step 4/5", "step 5/5"]


def test_a_step_with_a_validation_has_its_line_whatever_the_interval(tmp_path, capsys):
    arguments = (
        "--train-iters",
        "4",
        "--log-interval",
        "4",
        "--eval-interval",
        "3",
        "--eval-iters",
        "1",
    )
    with small_run(tmp_path, *arguments) as run:
        train(run, EvaluateHook(), LogHook())
    lines = capsys.readouterr().out.splitlines()
    assert steps_of(lines[::2]) == ["step 3/4", "step 4/4"]
    assert all(line.startswith("  valid ") for line in lines[1::2])
    assert ["valid_loss" in line for line in metrics_of(tmp_path)] == [False, False, True, True]


def test_the_steps_before_an_early_end_have_their_line(tmp_path, capsys):
    with small_run(
        tmp_path, "--train-iters", "9", "--log-interval", "5", "--exit-interval", "3"
    ) as run:
        train(run, LogHook())
    assert steps_of(lines_of(capsys)) == ["step 3/9"]


def test_metrics_of_steps_taken_again_are_replaced(tmp_path):
    # Given a run that saved step 2 and was killed after step 4,
    with (
        small_run(tmp_path, "--train-iters", "9", "--save-interval", "2") as run,
        pytest.raises(RuntimeError),
    ):
        train(run, LogHook(), CheckpointHook(), Failing(3))
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3]
    # when it goes on from there,
    with small_run(tmp_path, "--train-iters", "4") as run:
        train(run, LogHook())
    # then every step is there once, with samples that follow each other.
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4]
    assert [line["consumed_samples"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4]


def test_after_a_rollback_the_remaining_time_counts_from_the_step_taken_again(tmp_path, capsys):
    log = LogHook()
    run = SimpleNamespace(
        config=configure("tiny", train_iters=30, log_interval=1),
        context=SimpleNamespace(
            control=SimpleNamespace(is_first=True),
            topology=SimpleNamespace(world_size=1),
            device=SimpleNamespace(type="cpu"),
            heartbeat=Heartbeat(),
        ),
        folder=SimpleNamespace(metrics=tmp_path / "metrics.jsonl"),
        state=SimpleNamespace(step=0),
        inputs=SimpleNamespace(is_resumed=False),
    )
    log.before_training(run)
    log.begin_writing(run, step=0)
    for step in (1, 2, 3, 2):
        if step == 2 and run.state.step == 3:
            run.state.step = 1
            log.after_rollback(run, report_of(4))
        run.state.step = step
        log.after_step(run, report_of(step))
        log.after_read(run, report_of(step))
    log.close(failed=False)
    assert [line.split("/")[0] for line in lines_of(capsys)] == [
        "step  1",
        "step  2",
        "step  3",
        "step  2",
    ]
    assert log._first_end is not None and log._first_end[0] == 2
    rows = [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows == [1, 2]


def test_a_run_begun_anew_forgets_the_metrics_of_the_old_one(tmp_path):
    for _ in range(2):
        with small_run(tmp_path, "--train-iters", "2", "--no-auto-resume") as run:
            train(run, LogHook(), CheckpointHook())
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2]


def test_after_an_error_the_file_is_closed_and_the_bar_is_gone(tmp_path, monkeypatch):
    log = LogHook()
    monkeypatch.setattr(log._console, "_force_terminal", True)
    assert log._console.is_terminal
    with small_run(tmp_path, "--train-iters", "9") as run, pytest.raises(RuntimeError):
        train(run, log, Failing(2))
    assert log._metrics._file.closed
    assert not log._progress.live.is_started


class BreaksAtOnce(Hook):
    def before_training(self, run) -> None:
        raise RuntimeError("before anything was opened")


def test_a_log_that_never_began_can_be_closed(tmp_path):
    with small_run(tmp_path) as run, pytest.raises(RuntimeError, match="before anything"):
        train(run, BreaksAtOnce(), LogHook())


@ranks(2)
def test_only_the_first_rank_writes(ctx, tmp_path):
    log = LogHook()
    with small_run(tmp_path, "--train-iters", "2", context=ctx) as run:
        train(run, log)
    assert (log._metrics is None) is (ctx.rank == 1)
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2] or ctx.rank == 1


def test_the_bar_names_what_the_run_does():
    heartbeat, column = Heartbeat(), _Phase()
    shown = []
    for phase in ("forward-backward", "validation", "checkpoint", "data"):
        heartbeat.begin(phase)
        shown.append(column.render(SimpleNamespace(fields={"heartbeat": heartbeat})).plain.strip())
    assert shown == ["training", "validating", "saving", "training"]
