"""Ranks as threads do what ranks as processes over gloo do."""

import pytest
import torch
from torch import Tensor

from nanotrain.comm.all_to_all import start_all_to_all
from nanotrain.comm.collectives import (
    all_gather_into,
    all_gather_object,
    broadcast_object,
    gather_object,
    start_all_reduce,
    start_reduce_scatter_into,
)
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.send_recv import start_ring_send_recv
from tests.harness import run_ranks


def collect(ctx: ParallelContext) -> list[object]:
    """The result of every kind of collective, over all ranks and over half of them."""
    return [result for name in ("world", "tp") for result in collect_over(ctx, name)]


def collect_over(ctx: ParallelContext, name: str) -> list[object]:
    group = ctx.group(name)
    mine = torch.arange(8.0) * (ctx.rank + 1)
    # both in flight
    first, second = (start_all_reduce(mine.clone(), group, op=op) for op in ("sum", "max"))
    scattered, gathered = mine.new_empty(8 // group.size), mine.new_empty(8 * group.size)
    reduced = start_reduce_scatter_into(scattered, mine.clone(), group=group).wait()
    all_gather_into(gathered, mine, group=group)
    rows = [2] * group.size
    swapped = start_all_to_all(
        mine.new_empty(2 * group.size),
        mine[: 2 * group.size].clone(),
        output_splits=rows,
        input_splits=rows,
        group=group,
    ).wait()
    (received,) = start_ring_send_recv([mine], group).wait()
    results: list[Tensor] = [second.wait(), first.wait(), reduced, gathered, swapped, received]
    objects = [
        all_gather_object(ctx.rank, group),
        gather_object(ctx.rank, group),
        broadcast_object(ctx.rank, group),
    ]
    return [*(tensor.tolist() for tensor in results), *objects]


def test_every_collective_gives_what_it_gives_over_gloo() -> None:
    threads, processes = (run_ranks(4, collect, threads=threads, tp=2) for threads in (True, False))
    assert threads == processes


def wait_for_a_rank_that_fails(ctx: ParallelContext) -> None:
    if ctx.rank == 1:
        raise ValueError("planted")
    start_all_reduce(torch.ones(3), ctx.group("world")).wait()


def test_a_rank_that_fails_ends_the_others_and_is_the_one_that_is_named() -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"(?s)^rank 1 \(dp1\) of 3: .*ValueError: planted.*rank 0, 2"
    ):
        run_ranks(3, wait_for_a_rank_that_fails, threads=True)


def never_meet(ctx: ParallelContext) -> None:
    if ctx.rank == 0:
        start_all_reduce(torch.ones(3), ctx.group("world")).wait()
    else:
        start_ring_send_recv([torch.ones(3)], ctx.group("world")).wait()


def test_ranks_that_wait_for_each_other_are_killed_with_their_stacks() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"(?s)did not finish within 0.5 s.*never_meet"):
        run_ranks(2, never_meet, threads=True, timeout_s=0.5)


def start_different_collectives(ctx: ParallelContext) -> None:
    if ctx.rank == 0:
        start_all_reduce(torch.ones(2), ctx.group("world")).wait()
    else:
        start_reduce_scatter_into(torch.ones(1), torch.ones(2), group=ctx.group("world")).wait()


def test_ranks_that_start_different_collectives_are_told() -> None:
    with pytest.raises(pytest.fail.Exception, match="starts .*, another one"):
        run_ranks(2, start_different_collectives, threads=True)
