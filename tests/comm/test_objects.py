"""Objects over gloo: one collective for a small one, whatever its length, and the result of large ones."""

from functools import partial

import pytest
import torch.distributed as dist

from nanotrain.comm import parallel_context
from nanotrain.comm.collectives import all_reduce_scalars, barrier, broadcast_object, gather_object
from nanotrain.comm.objects import LENGTH_BYTES, PACKET_BYTES
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.process_groups import create_control
from tests.harness import ranks, run_ranks

OPERATIONS = ("broadcast", "gather", "all_gather", "all_reduce", "isend", "irecv", "send", "recv")
FITS = PACKET_BYTES - LENGTH_BYTES - 100  # leaves room for the frame of a pickle
SIZES = (0, FITS, FITS + 70, FITS + 100, PACKET_BYTES, 40 * PACKET_BYTES + 1)


def count_operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of torch's operations, in the order in which this rank calls them."""
    called: list[str] = []
    for name in OPERATIONS:
        real = getattr(dist, name)

        def counted(*args, name=name, real=real, **options):
            called.append(name)
            return real(*args, **options)

        monkeypatch.setattr(dist, name, counted)
    return called


@ranks(3, threads=False)
def test_a_small_object_and_numbers_take_one_collective_each_way(ctx):
    with pytest.MonkeyPatch.context() as patch:
        called = count_operations(patch)
        assert broadcast_object(("verdict", ctx.rank), ctx.control) == ("verdict", 0)
        assert called == ["broadcast"]
        assert broadcast_object(bytes(FITS), ctx.control) == bytes(FITS)
        assert called == ["broadcast"] * 2
        called.clear()
        assert gather_object(ctx.rank, ctx.control) == ([0, 1, 2] if ctx.rank == 0 else None)
        assert called == ["gather"]
        called.clear()
        assert all_reduce_scalars([ctx.rank, 0.1], ctx.control) == [3.0, 0.1 + 0.1 + 0.1]
        assert all_reduce_scalars([ctx.rank], ctx.control, op="min") == [0.0]
        assert called == ["gather", "broadcast"] * 2
        barrier(ctx.control)


def send_all_sizes(ctx, fan_out):
    parallel_context.create_control = partial(create_control, fan_out=fan_out)
    control = ParallelContext.attach(ctx.topology).control
    for size in SIZES:
        mine = bytes([ctx.rank]) * size
        assert broadcast_object(mine, control) == bytes(size)
        gathered = gather_object(mine, control)
        assert gathered == ([bytes([rank]) * size for rank in range(control.size)] if ctx.rank == 0 else None)
        # one rank's alone is large
        gathered = gather_object(mine if ctx.rank == 1 else ctx.rank, control)
        assert gathered is None or gathered == [0, bytes([1]) * size, *range(2, control.size)]


@pytest.mark.parametrize("fan_out", [3, None])
def test_objects_of_any_size_arrive_whole(fan_out):
    run_ranks(4, send_all_sizes, fan_out, threads=False)


@ranks(3, threads=True)
def test_large_objects_arrive_on_ranks_that_are_threads(ctx):
    large = bytes([ctx.rank]) * 2 * PACKET_BYTES
    assert broadcast_object(large, ctx.control) == bytes(2 * PACKET_BYTES)
    gathered = gather_object(large, ctx.control)
    assert gathered is None or [part[:1] for part in gathered] == [b"\0", b"\1", b"\2"]
