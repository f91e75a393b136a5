"""gloo collectives by direct sends: summed in rank order, rounded once, in place or not."""

from itertools import product

import pytest
import torch

from nanotrain.comm import gloo
from nanotrain.comm.collectives import start_all_gather_into, start_reduce_scatter_into
from tests.harness import run_ranks

_SLICE = 37  # elements per slice: several chunks of 8


def version_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's input [n]; sums of these depend on the order and on every rounding."""
    generator = torch.Generator().manual_seed(rank)
    scale = 10.0 ** torch.randint(-3, 4, (size * _SLICE,), generator=generator)
    return (torch.randn(size * _SLICE, generator=generator) * scale).to(dtype)


def expected_slice(rank: int, size: int, dtype: torch.dtype, *, divisor: int = 1) -> torch.Tensor:
    total = version_of(0, size, dtype).float()
    for source in range(1, size):
        total = total + version_of(source, size, dtype).float()
    return (total / divisor).to(dtype).view(size, _SLICE)[rank]


def scatter_into_a_separate_output(group, dtype):
    tensor, output = (
        version_of(group.index, group.size, dtype),
        torch.full((_SLICE,), torch.nan, dtype=dtype),
    )
    start_reduce_scatter_into(output, tensor, group=group).wait()
    assert torch.equal(output, expected_slice(group.index, group.size, dtype))
    start_reduce_scatter_into(output, tensor, group=group, op="avg").wait()
    assert torch.equal(output, expected_slice(group.index, group.size, dtype, divisor=group.size))
    assert torch.equal(tensor, version_of(group.index, group.size, dtype)), (
        "the input must not change"
    )


def scatter_into_the_local_slice(group, dtype):
    tensor = version_of(group.index, group.size, dtype)
    rows, before = tensor.view(group.size, _SLICE), tensor.clone().view(group.size, _SLICE)
    start_reduce_scatter_into(rows[group.index], tensor, group=group).wait()
    assert torch.equal(rows[group.index], expected_slice(group.index, group.size, dtype))
    others = [row for row in range(group.size) if row != group.index]
    assert torch.equal(rows[others], before[others]), "only the local slice may change"


def scatter_every_way(ctx):
    gloo._CHUNK = 8
    for scatter, dtype in product(
        (scatter_into_a_separate_output, scatter_into_the_local_slice),
        (torch.float32, torch.bfloat16),
    ):
        scatter(ctx.group("world"), dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_reduce_scatter_is_the_sum_in_rank_order_rounded_once(size):
    run_ranks(size, scatter_every_way, threads=False)


def reduce_many_at_once(ctx):
    gloo._CHUNK = 8
    group = ctx.group("world")
    tensors = [torch.arange(4.0 * size) + ctx.rank for size in (50, 3, 0, 200)]
    outputs = [torch.empty(tensor.numel() // 4) for tensor in tensors]
    works = [
        start_reduce_scatter_into(output, tensor, group=group)
        for output, tensor in zip(outputs, tensors, strict=True)
    ]
    for work in reversed(works):
        work.wait()
    for output, tensor in zip(outputs, tensors, strict=True):
        total = torch.arange(float(tensor.numel())) * 4 + 6
        assert torch.equal(output, total.chunk(4)[ctx.rank] if tensor.numel() else total)


def test_reductions_in_flight_together_do_not_mix_and_may_be_waited_for_in_any_order():
    run_ranks(4, reduce_many_at_once, threads=False)


def gather_both_ways(group, dtype):
    local = torch.arange(5).to(dtype) + 10 * group.index
    full = torch.cat([torch.arange(5).to(dtype) + 10 * rank for rank in range(group.size)])
    separate, in_place = (
        torch.empty(5 * group.size, dtype=dtype),
        torch.empty(5 * group.size, dtype=dtype),
    )
    slot = in_place.view(group.size, 5)[group.index]
    slot.copy_(local)
    into_separate = start_all_gather_into(separate, local, group=group)
    start_all_gather_into(in_place, slot, group=group).wait()
    into_separate.wait()
    assert torch.equal(separate, full)
    assert torch.equal(in_place, full)


def gather_every_dtype(ctx):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        gather_both_ways(ctx.group("world"), dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_gather_collects_in_group_order(size):
    run_ranks(size, gather_every_dtype, threads=False)
