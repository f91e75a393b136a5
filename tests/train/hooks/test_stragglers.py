"""Ranks that stay slow are named after the stated time, once."""

import platform

from nanotrain.train.hooks.stragglers import SlowRanks, StragglerHook
from tests.train.small_run import report_of, small_run

EVEN = [1.0, 1.0, 1.0, 1.1]
SLOW = [1.0, 1.0, 3.0, 1.1]


def add(ranks: SlowRanks, steps, busy_s) -> list[tuple[int, int]]:
    """The stragglers of steps of 10 s: the step at which a rank is named, and the rank."""
    named = []
    for step in steps:
        named += [(step, rank) for rank in ranks.add(step, busy_s, step_time_s=10.0)]
    return named


def test_a_rank_is_named_once_it_was_slow_for_the_whole_time():
    ranks = SlowRanks(factor=1.5, duration_s=30.0)
    assert add(ranks, range(1, 5), EVEN) == []
    assert add(ranks, range(5, 7), SLOW) == [] and add(ranks, [7], EVEN) == []
    assert add(ranks, range(8, 14), SLOW) == [(10, 2)], "a break starts the time again"
    assert add(ranks, [14], EVEN) == []
    assert add(ranks, range(15, 19), SLOW) == [(17, 2)], "and another slow time is named again"


def test_the_factor_is_of_the_median_and_the_ratio_of_the_slow_steps():
    ranks = SlowRanks(factor=3.0, duration_s=10.0)
    assert add(ranks, range(1, 9), SLOW) == []
    slow = ranks.add(9, [1.0, 1.0, 6.0, 2.0], step_time_s=10.0)[2]
    assert slow.ratio == 4.0 and slow.first_step == 9


def test_the_log_names_rank_and_host(tmp_path, logged):
    with small_run(tmp_path) as run:
        hook = StragglerHook(factor=1.5, duration_s=1.0)
        hook.before_training(run)
        for step in (2, 3, 4):
            hook.after_read(run, report_of(step, busy_s=[0.9], step_time_s=0.5))
        assert not logged
        for step in (5, 6, 7):
            hook.after_read(run, report_of(step, busy_s=[0.9, 0.1, 0.1], step_time_s=0.5))
    (line,) = logged
    assert f"rank 0 (one rank, host {platform.node()}) is a straggler: 9.0 times" in line
    assert line.endswith("for 1 s, since step 4")
