"""The agreement on where to stop: the same microbatch on every rank, whatever their speeds."""

import math
import random
import threading
import time
from itertools import count

import pytest
import torch.distributed as dist

from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.stop_point import PassStopped, StopPoint
from nanotrain.comm.work import CommunicationFault
from tests.harness import HANG_S, run_ranks

NUM_MICROBATCHES = 20


def point_of_one_rank(store: dist.Store | None = None, *, timeout_s: float = 5.0) -> StopPoint:
    point = StopPoint(store or dist.HashStore(), Group.single_rank("world"), timeout_s=timeout_s)
    point.poll_s = 0.01
    return point


def until(condition) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def run_at_random_speed(ctx: ParallelContext, seed: int) -> tuple[int, int]:
    """Passes until the stop, in which ranks do not wait for each other; returns the pass and its
    microbatches.
    """
    speed, wants_stop = random.Random(f"{seed} {ctx.rank}"), False
    point = StopPoint(ctx.store, ctx.control, timeout_s=HANG_S)
    point.poll_s = 0.005 * speed.random()
    point.start(lambda: wants_stop)
    at = speed.randrange(NUM_MICROBATCHES)
    for number in count():
        point.begin_pass()
        begun = 0
        for microbatch in range(NUM_MICROBATCHES):
            wants_stop = wants_stop or (ctx.rank == seed % 3 and microbatch == at)
            begun += point.may_begin(microbatch)
            time.sleep(0.002 * speed.random())
        try:
            point.end_pass(NUM_MICROBATCHES)
        except PassStopped as stopped:
            assert stopped.num_microbatches == begun < NUM_MICROBATCHES
            point.end()
            return number, begun
    raise AssertionError


def agree_again_and_again(ctx: ParallelContext) -> list[tuple[int, int]]:
    return [run_at_random_speed(ctx, seed) for seed in range(4)]


def test_ranks_of_any_speed_stop_before_the_same_microbatch():
    first, *others = run_ranks(3, agree_again_and_again, threads=True)
    assert others == [first, first]


def test_without_a_request_nothing_is_written_into_the_store():
    store = dist.HashStore()
    point = point_of_one_rank(store)
    point.start(lambda: False)
    point.begin_pass()
    time.sleep(0.05)
    assert all(point.may_begin(each) for each in (1, 0, 2))
    point.end_pass(3)
    point.end()
    assert store.num_keys() == 0


class Looks(threading.Event):
    """Counts how often it is waited for."""

    number = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.number += 1
        return super().wait(timeout)


def test_a_short_pass_does_not_read_the_store():
    point, looks, requests = point_of_one_rank(), Looks(), []
    point._ended = looks
    point._pass_start = math.inf  # passes begin more often than it looks, on a machine of any speed
    point.start(lambda: requests.append(looks.number))
    until(lambda: looks.number > 5)
    assert not requests
    point._pass_start = -math.inf
    until(lambda: requests)
    point.end()
    assert requests[0] > 5 and not point._holds


def test_what_has_begun_is_completed_and_later_passes_begin_nothing():
    asks = False
    point = point_of_one_rank()
    point.start(lambda: asks)
    point.begin_pass()
    assert point.may_begin(3)
    asks = True
    until(lambda: point._holds)
    assert [point.may_begin(each) for each in (4, 2, 3)] == [False, True, True]
    point.end_pass(4)  # none was left out
    with pytest.raises(PassStopped, match="after 4 microbatches"):
        point.end_pass(5)
    point.begin_pass()
    assert not point.may_begin(0)
    point.end()


class LostStore(dist.Store):
    """The process that served it has ended."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("connection closed")


def test_a_lost_store_stops_nothing():
    point = point_of_one_rank(LostStore())
    point.start(lambda: True)
    assert point._thread is not None
    point._thread.join(timeout=HANG_S)
    point.begin_pass()
    assert point.may_begin(0)
    point.end_pass(1)
    point.end()


def wait_for_a_rank_that_does_not_reply(ctx: ParallelContext) -> None:
    point = StopPoint(ctx.store, ctx.control, timeout_s=0.05)
    point.poll_s = 0.01 if ctx.rank == 0 else 60.0
    point.start(lambda: ctx.rank == 0)
    point.begin_pass()
    if ctx.rank == 0:
        until(lambda: point._holds)
        with pytest.raises(CommunicationFault, match="did not reply"):
            point.may_begin(0)
    point.end()


def test_a_rank_that_does_not_reply_in_time_is_an_error():
    run_ranks(2, wait_for_a_rank_that_does_not_reply, threads=True)
