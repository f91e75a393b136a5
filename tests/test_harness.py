"""The harness: results by rank, failures reported with their rank, no rank left running."""

import os
import time

import pytest

from nanotrain.comm.collectives import all_reduce_scalars, barrier
from tests.harness import HANG_S, ranks, run_ranks


@ranks(4, threads=False, tp=2, strategy="optim")
def test_each_rank_gets_a_live_context(ctx):
    assert ctx.topology.world_size == 4
    assert ctx.group("tp").size == ctx.group("dp_shard").size == 2
    assert all_reduce_scalars([1.0], ctx.group("world")) == [4.0]


@ranks(2, threads=False)
@pytest.mark.parametrize("number", [3, 5])
def test_fixtures_and_parameters_reach_every_rank(ctx, number, tmp_path):
    (tmp_path / str(ctx.rank)).write_text(str(number))
    barrier(ctx.control)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [str(number)] * 2


def double_rank(ctx, offset):
    return 2 * ctx.rank + offset


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_results_come_back_by_rank(num_ranks):
    assert run_ranks(num_ranks, double_rank, 1, threads=False) == [
        2 * rank + 1 for rank in range(num_ranks)
    ]


def fail_on_rank_2(ctx):
    if ctx.rank == 2:
        raise ValueError("seven is not even")
    barrier(ctx.control)


def test_a_failure_shows_the_rank_its_coordinates_and_its_traceback_only():
    with pytest.raises(pytest.fail.Exception) as failure:
        run_ranks(4, fail_on_rank_2, threads=False, tp=2)
    message = str(failure.value)
    assert message.startswith("rank 2 (dp1 tp0) of 4: Traceback")
    assert "ValueError: seven is not even" in message
    assert "tests/harness.py" not in message
    assert message.count("Traceback") == 1


def hang_on_rank_1(ctx):
    if ctx.rank == 1:
        time.sleep(2 * HANG_S)


def test_a_rank_that_hangs_is_killed_and_reported_with_its_stack():
    with pytest.raises(pytest.fail.Exception) as failure:
        run_ranks(2, hang_on_rank_1, threads=False, timeout_s=0.5)
    assert "did not finish within 0.5 s" in str(failure.value)
    assert "hang_on_rank_1" in str(failure.value)


def die_on_rank_0(ctx):
    if ctx.rank == 0:
        os._exit(7)
    barrier(ctx.control)


def test_a_rank_that_exits_is_reported():
    with pytest.raises(
        pytest.fail.Exception, match=r"rank 0 of 2: exited with code 7 and sent no reply"
    ):
        run_ranks(2, die_on_rank_0, threads=False)


@ranks(2, threads=False)
def skip_everywhere(ctx):
    pytest.skip("no GPU")


def test_a_skip_on_the_ranks_is_a_skip_of_the_test():
    with pytest.raises(pytest.skip.Exception, match="no GPU"):
        skip_everywhere()
