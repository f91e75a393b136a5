"""Where a restart in place spends its time."""

from nanotrain.comm.generation_store import Fault, Restart
from nanotrain.train.hooks.restart import seconds_of_restart


def test_the_parts_of_a_restart_add_up() -> None:
    restart = Restart(Fault(1, "SIGKILL ended it", 10.0), noticed_s=10.5, met_s=12.0)
    seconds = seconds_of_restart(restart, times=(12.25, 13.0, 15.0))
    assert seconds == {
        "notice": 0.5,
        "agree": 1.5,
        "groups": 0.25,
        "load": 0.75,
        "first step": 2.0,
    }


def test_a_clock_that_is_behind_takes_no_time() -> None:
    restart = Restart(Fault(1, "SIGKILL ended it", 10.0), noticed_s=9.0, met_s=12.0)
    seconds = seconds_of_restart(restart, times=(11.0, 13.0, 14.0))
    assert seconds["notice"] == seconds["groups"] == 0.0
    assert sum(seconds.values()) == 4.0
