"""The timeout of collectives and of the watchdog falls after the first step of a start."""

from pathlib import Path

import pytest

from nanotrain.errors import ConfigError
from nanotrain.train.open_run import choose_hooks
from nanotrain.watch.watchdog import Watchdog
from tests.train.small_run import Spy, arguments, load, small_run, train


class TimeoutSpy(Spy):
    def after_step(self, run, report) -> None:
        self.calls.append(str(run.context.timeout_s))


def test_it_is_lowered_after_the_first_step_and_the_watchdog_follows(tmp_path: Path) -> None:
    spy = TimeoutSpy()
    with small_run(
        tmp_path, "--train-iters", "2", "--distributed-timeout-seconds-after-init", "30"
    ) as run:
        lowers = choose_hooks(run.config, None)[0]
        run.context.timeout_s = 600.0
        watchdog = Watchdog(run.context, tmp_path, timeout_s=None)
        assert watchdog._timeout_s == 540.0
        run.context.set_timeout = lambda timeout_s, first=run.context.set_timeout: (
            spy.calls.append("set"),
            first(timeout_s),
        )
        train(run, spy, lowers)
        assert spy.calls[:4] == ["before", "600.0", "set", "30.0"] and spy.calls.count("set") == 1
        assert watchdog._timeout_s == 27.0


@pytest.mark.parametrize(
    ("flags", "watched_s"), [((), 540.0), (("--hang-timeout-s", "120"), 120.0)]
)
def test_without_the_flag_later_steps_and_saves_keep_the_timeout_of_the_start(
    tmp_path, flags, watched_s
) -> None:
    spy = TimeoutSpy()
    with small_run(tmp_path, "--train-iters", "2", *flags) as run:
        run.context.timeout_s = 600.0
        watchdog = Watchdog(run.context, tmp_path, timeout_s=run.config.train.hang_timeout_s)
        train(run, spy, *choose_hooks(run.config, None)[:1])
        assert spy.calls[:3] == ["before", "600.0", "600.0"] and watchdog._timeout_s == watched_s


@pytest.mark.parametrize(
    "more", [["--distributed-timeout-minutes", "0.4"], ["--hang-timeout-s", "30"]]
)
def test_a_timeout_that_rises_or_hides_the_watchdog_is_an_error(
    tmp_path: Path, more: list[str]
) -> None:
    with pytest.raises(ConfigError, match="distributed_timeout_seconds_after_init 30"):
        load(arguments(tmp_path, "--distributed-timeout-seconds-after-init", "30", *more))
