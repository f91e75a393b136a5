"""Collectives: results, counted bytes, groups of one rank, wrong arguments."""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from nanotrain.comm import parallel_context
from nanotrain.comm.collectives import (
    all_gather_into,
    all_gather_object,
    all_reduce,
    all_reduce_scalars,
    barrier,
    broadcast_object,
    gather_object,
    local_slice,
    start_all_gather,
    start_all_gather_into,
    start_all_reduce,
    start_reduce_scatter,
    start_reduce_scatter_into,
)
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.process_groups import create_control
from tests.harness import ranks, run_ranks


@ranks(4, threads=False)
def test_all_reduce_is_in_place(ctx):
    for op, expected in (("sum", 10.0), ("max", 4.0), ("min", 1.0)):
        tensor = torch.full((3, 2), float(ctx.rank + 1))
        all_reduce(tensor, ctx.group("world"), op=op)
        assert torch.equal(tensor, torch.full((3, 2), expected)), op


@ranks(4, threads=False, tp=2)
def test_a_collective_stays_inside_its_group(ctx):
    tensor = torch.tensor([float(10**ctx.rank)])
    all_reduce(tensor, ctx.group("dp"))
    assert tensor.item() == (101.0 if ctx.rank in (0, 2) else 1010.0)


@ranks(3, threads=False)
def test_host_numbers_and_objects_are_communicated(ctx):
    world = ctx.group("world")
    assert all_reduce_scalars([1, 0.1 * ctx.rank], world) == pytest.approx([3.0, 0.3], rel=1e-15)
    assert all_reduce_scalars([ctx.rank], world, op="max") == [2.0]
    assert all_gather_object({"rank": ctx.rank}, ctx.control) == [
        {"rank": rank} for rank in range(3)
    ]
    barrier(ctx.control)


def test_in_a_group_of_one_the_output_is_the_input_and_nothing_is_counted():
    single = Group.single_rank("dp")
    tensor, output = torch.arange(4.0), torch.empty(4)
    all_reduce(tensor, single)
    start_reduce_scatter_into(output, tensor, group=single).wait()
    assert torch.equal(output, torch.arange(4.0))
    all_gather_into(output, tensor + 1, group=single)
    assert torch.equal(output, torch.arange(4.0) + 1)
    assert all_reduce_scalars([1, 2.5], single) == [1.0, 2.5]
    assert all_gather_object("object", single) == ["object"]
    barrier(single)
    assert single.traffic.calls() == 0


@ranks(4, threads=False, tp=2)
def test_collectives_along_a_dim_concatenate_and_split_it(ctx):
    for dim in range(3):
        concatenate_and_split(ctx.group("tp"), dim)


def concatenate_and_split(group: Group, dim: int) -> None:
    full = torch.arange(4 * 6 * 2.0).view(4, 6, 2).transpose(0, 1)
    part = local_slice(full, group, dim=dim)
    assert torch.equal(part, full.chunk(2, dim)[group.index])
    assert torch.equal(start_all_gather(part, group, dim=dim).wait(), full)
    assert torch.equal(start_reduce_scatter(full, group, dim=dim).wait(), 2 * part)
    gathered = start_all_gather(part, group, dim=dim).wait()
    start_all_gather(-part, group, dim=dim).wait()
    start_reduce_scatter(-full, group, dim=dim).wait()
    assert torch.equal(gathered, full), "a result lies in memory that the next collective uses"
    assert torch.equal(start_all_reduce(full.contiguous(), group).wait(), 2 * full)


@pytest.mark.parametrize("start", [start_reduce_scatter_into, start_all_gather_into])
def test_a_group_of_one_in_place_copies_nothing(start):
    tensor = torch.arange(4.0)
    assert start(tensor, tensor, group=Group.single_rank("dp")).wait() is tensor
    assert torch.equal(tensor, torch.arange(4.0))


@ranks(2, threads=False)
def test_wrong_slices_raise_before_anything_is_sent(ctx):
    with pytest.raises(AssertionError, match="would be read as"):
        start_reduce_scatter_into(
            torch.empty(2), torch.empty(4, dtype=torch.bfloat16), group=ctx.group("world")
        )
    with pytest.raises(AssertionError, match="not by strides"):
        start_all_gather_into(torch.empty(8)[::2], torch.empty(2), group=ctx.group("world"))
    with pytest.raises(AssertionError, match="unequal slices"):
        start_reduce_scatter_into(torch.empty(2), torch.empty(5), group=ctx.group("world"))
    with pytest.raises(AssertionError, match="unequal slices"):
        start_all_gather_into(torch.empty(5), torch.empty(2), group=ctx.group("world"))
    assert ctx.traffic.calls() == 0


@ranks(4, threads=False)
def test_traffic_counts_the_textbook_bytes(ctx):
    world, full, slice_ = ctx.group("world"), torch.zeros(400), torch.zeros(100)
    start_reduce_scatter_into(slice_, full, group=world).wait()
    all_gather_into(full, slice_, group=world)
    all_reduce(full, world)
    all_reduce_scalars([0.0, 0.0], world)
    assert ctx.traffic.bytes("world", "reduce_scatter") == 1600 * 3 // 4
    assert ctx.traffic.bytes("world", "all_gather") == 1600 * 3 // 4
    assert ctx.traffic.bytes("world", "all_reduce") == 2 * 1600 * 3 // 4
    assert ctx.traffic.bytes("world", "all_reduce_scalars") == 2 * 16 * 3 // 4
    assert ctx.traffic.calls() == 4


def written_bytes() -> int:
    """Bytes that this process has written, sockets included; -1 if the system does not count them."""
    counters = Path("/proc/self/io")
    lines = counters.read_text().splitlines() if counters.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar:")), -1)


@ranks(4, threads=False)
def test_traffic_agrees_with_the_bytes_written_to_sockets(ctx):
    if written_bytes() < 0:
        pytest.skip("this system does not count them")
    world, full, slice_ = ctx.group("world"), torch.zeros(1 << 20), torch.zeros(1 << 18)
    collectives = {
        "reduce_scatter": lambda: start_reduce_scatter_into(slice_, full, group=world).wait(),
        "all_gather": lambda: all_gather_into(full, slice_, group=world),
        "all_reduce": lambda: all_reduce(full, world),
    }
    for op, collective in collectives.items():
        barrier(ctx.control)
        before = written_bytes()
        collective()
        barrier(ctx.control)
        written, counted = written_bytes() - before, ctx.traffic.bytes("world", op)
        assert written == pytest.approx(counted, rel=0.005), (
            f"{op}: {written} bytes written, {counted} counted"
        )


@ranks(2, threads=False)
def test_no_collective_warns_of_a_deprecated_name(ctx):
    world, full, slice_ = ctx.group("world"), torch.zeros(4), torch.zeros(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start_reduce_scatter_into(slice_, full, group=world).wait()
        all_gather_into(full, slice_, group=world)
        all_reduce(full, world)
        start_all_reduce(full, world, op="max").wait()
        all_reduce_scalars([1.0], world)
        all_gather_object(1, world)
        barrier(world)


SIZES = (0, 100, 1_000_001)


def send_all_sizes(ctx, fan_out):
    parallel_context.create_control = partial(create_control, fan_out=fan_out)
    control = ParallelContext.attach(ctx.topology).control
    for size in SIZES:
        message = bytes([ctx.rank]) * size
        assert broadcast_object(message, control) == bytes(size)
        gathered = gather_object(message, control)
        assert gathered == (
            [bytes([rank]) * size for rank in range(control.size)] if ctx.rank == 0 else None
        )
        # one rank's alone is large
        gathered = gather_object(message if ctx.rank == 1 else ctx.rank, control)
        assert gathered is None or gathered == [0, bytes([1]) * size, *range(2, control.size)]


@pytest.mark.parametrize("fan_out", [3, None])
def test_objects_of_any_size_arrive_whole(fan_out):
    run_ranks(4, send_all_sizes, fan_out, threads=False)
