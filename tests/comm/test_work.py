"""`Work`: results, repeated waits, and errors that name the group and the rank of a failure."""

import os
import re

import pytest
import torch

from nanotrain.comm.collectives import (
    all_reduce_scalars,
    start_all_gather_into,
    start_all_reduce,
    start_reduce_scatter_into,
)
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.work import Work
from nanotrain.errors import EnvironmentFault
from tests.harness import ranks, run_ranks


@ranks(2, threads=False)
def test_a_second_wait_does_nothing(ctx):
    tensor = torch.ones(3)
    work = start_all_reduce(tensor, ctx.group("world"))
    work.wait()
    work.wait()
    assert torch.equal(tensor, torch.full((3,), 2.0))
    output = torch.empty(2)
    work = start_reduce_scatter_into(output, torch.ones(4), group=ctx.group("world"))
    work.wait()
    output.zero_()
    work.wait()
    assert torch.equal(output, torch.zeros(2)), "the sum must not be written twice"


def test_a_conversion_runs_once_and_only_when_waited_for():
    converted = []
    work = Work.completed(3).then(lambda result: converted.append(result) or str(result))
    assert converted == []
    assert (work.wait(), work.wait(), converted) == ("3", "3", [3])


def start(op: str, group):
    full, part = torch.ones(4), torch.ones(2)
    if op == "all_reduce":
        return start_all_reduce(full, group)
    return (
        start_reduce_scatter_into(part, full, group=group)
        if op == "reduce_scatter"
        else start_all_gather_into(full, part, group=group)
    )


def lose_a_rank(ctx, op, folder):
    group = ctx.group("dp")
    all_reduce_scalars([0.0], group)
    if ctx.coords["dp"] == 1:
        os._exit(3)
    try:
        start(op, group).wait()
    except EnvironmentFault as fault:
        (folder / f"rank {ctx.rank}").write_text(str(fault))
        raise


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_lost_rank_raises_at_once_with_group_and_rank(op, tmp_path):
    with pytest.raises(
        pytest.fail.Exception, match="rank [23] of 4: exited with code 3 and sent no reply"
    ):
        run_ranks(4, lose_a_rank, op, tmp_path, tp=2, threads=False)
    for rank in range(2):
        message = (
            rf"{op} #[12] of [0-9]+ bytes over group dp \(ranks .*\) failed on rank {rank} \(dp0 tp"
        )
        assert re.search(message, (tmp_path / f"rank {rank}").read_text())


def start_late(ctx, op):
    impatient = ParallelContext.attach(ctx.topology)
    impatient.set_timeout(0.5)
    group = impatient.control
    if ctx.rank == 1:  # it goes on to the end of the test, where it waits for rank 0
        return ""
    work = start(op, group)
    with pytest.raises(EnvironmentFault) as fault:
        work.wait()
    with pytest.raises(EnvironmentFault):
        work.wait()
    return str(fault.value)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_late_rank_raises_after_the_timeout(op):
    message = run_ranks(2, start_late, op, threads=False)[0]
    assert re.search(
        rf"{op} #1 of [0-9]+ bytes over group control \(ranks 0-1\) failed on rank 0 \(dp0\)",
        message,
    )
    assert "--distributed-timeout-minutes" in message
