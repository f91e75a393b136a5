"""A function on every rank of a world of CPU processes, and ranks that fail or die."""

import os
import time

import pytest
import torch

from nanotrain.comm.collectives import all_reduce, barrier
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.parallel import ParallelConfig
from nanotrain.errors import ConfigError, EnvironmentFault
from nanotrain.parity.local_ranks import run_local_ranks
from nanotrain.topology.topology import Topology
from tests.harness import HANG_S

FOUR = Topology.of(ParallelConfig(tensor_model_parallel_size=2), 4)
TWO = Topology.of(ParallelConfig(), 2)


def sum_over_tp(context: ParallelContext, factor: float) -> tuple[int, float]:
    tensor = torch.tensor([factor * context.rank])
    all_reduce(tensor, context.group("tp"))
    return os.getpid(), tensor.item()


def refuse_on_rank_1(context: ParallelContext) -> None:
    if context.rank == 1:
        raise ConfigError("a mistake", why="of one rank", fix="correct it")
    barrier(context.control)


def fail_on_rank_1(context: ParallelContext) -> None:
    if context.rank == 1:
        raise ZeroDivisionError("planted")
    barrier(context.control)


def die_on_rank_1(context: ParallelContext) -> None:
    if context.rank == 1:
        os._exit(3)
    time.sleep(2 * HANG_S)


def test_every_rank_runs_in_its_own_process_and_results_are_by_rank() -> None:
    results = run_local_ranks(FOUR, sum_over_tp, arguments=[10.0])
    assert [value for _, value in results] == [10.0, 10.0, 50.0, 50.0]
    assert len({pid for pid, _ in results} | {os.getpid()}) == 5


def test_a_world_of_one_needs_no_process_group() -> None:
    ((_, value),) = run_local_ranks(Topology.of(ParallelConfig(), 1), sum_over_tp, arguments=[10.0])
    assert value == 0.0


def test_an_error_of_one_rank_is_raised_as_it_is() -> None:
    with pytest.raises(ConfigError, match="a mistake: of one rank; correct it"):
        run_local_ranks(TWO, refuse_on_rank_1)


def test_any_other_failure_shows_the_ranks_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: Traceback.*ZeroDivisionError: planted"):
        run_local_ranks(TWO, fail_on_rank_1)


def test_a_rank_that_dies_ends_the_others() -> None:
    began = time.monotonic()
    with pytest.raises(EnvironmentFault, match="rank 1 died"):
        run_local_ranks(TWO, die_on_rank_1)
    assert time.monotonic() - began < HANG_S, "before the other rank would have ended by itself"


def die_on_rank_1_in_a_collective(context: ParallelContext) -> None:
    if context.rank == 1:
        os._exit(3)
    raise EnvironmentFault("an all_reduce failed", why="connection closed")


def test_a_rank_that_died_is_the_cause_though_its_peer_fails_too() -> None:
    with pytest.raises(EnvironmentFault, match="rank 1 died"):
        run_local_ranks(TWO, die_on_rank_1_in_a_collective)
