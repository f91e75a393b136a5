"""Reductions of gradients against fp64 sums: what each precision rounds, and the mean inside the collective."""

import pytest
import torch
from torch import Tensor

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.dp.reduction import ReduceGroups, Reduction, shard_of
from tests.harness import ranks, run_ranks

NUMEL = 4 * 3 * 128
BF16, FP16, FP32 = 2.0**-8, 2.0**-11, 2.0**-24  # largest relative error of one rounding


def grads_of(rank: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def groups_of(ctx: ParallelContext, *, shards_across: bool = False) -> ReduceGroups:
    return ReduceGroups(ctx.group("dp_shard"), ctx.group("dp_replicate"), shards_across=shards_across)


def reduced(ctx: ParallelContext, dtype: torch.dtype, **options: bool) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's shard as the collective sums it, the fp64 sums of the exact and of the rounded gradients."""
    group, full = ctx.group("dp_shard"), grads_of(ctx.rank).to(dtype)
    Reduction(groups_of(ctx), **options).start_inside(full).wait()
    exact = sum(grads_of(rank) for rank in range(group.size))
    rounded = sum(grads_of(rank).to(dtype).double() for rank in range(group.size))
    return shard_of(full, group).double(), shard_of(exact, group), shard_of(rounded, group)


def errors(ctx: ParallelContext) -> dict[str, float]:
    """Largest errors against the fp64 sum, relative to the sum of magnitudes."""
    group = ctx.group("dp_shard")
    magnitude = shard_of(sum(grads_of(rank).abs() for rank in range(group.size)), group)
    found = {}
    for name, dtype, options in (
        ("fp32", torch.float32, {}),
        ("bf16", torch.bfloat16, {}),
        ("bf16 all-reduce", torch.bfloat16, {"keeps_full": True}),
        ("bf16 all-to-all", torch.bfloat16, {"by_all_to_all": True}),
        ("fp16 all-to-all", torch.float16, {"by_all_to_all": True}),
    ):
        got, exact, rounded = reduced(ctx, dtype, **options)
        found[name] = ((got - exact).abs() / magnitude).max().item()
        if options.get("by_all_to_all"):
            assert torch.equal(got, rounded.float().to(dtype).double()), "rounded more than once"
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_error_of_a_reduction_is_that_of_its_precision(size: int) -> None:
    for found in run_ranks(size, errors, strategy="optim"):
        assert found["fp32"] < size * 2 * FP32
        assert 100 * found["fp32"] < found["bf16"] < 2 * BF16  # one rounding of every input, one of the sum
        assert found["bf16 all-to-all"] < 2 * BF16 and found["fp16 all-to-all"] < 2 * FP16
        assert found["bf16 all-reduce"] < (size + 1) * BF16  # rounded after every addition


def shards_summed_everywhere(ctx: ParallelContext) -> None:
    """Integers, so that every dtype and order gives the same sums."""
    for shards_across in (False, True):
        for options in ({}, {"keeps_full": True}, {"by_all_to_all": True}, {"averages": True, "scale": 2.0}):
            groups = groups_of(ctx, shards_across=shards_across)
            reduction = Reduction(groups, **options)
            pattern = torch.arange(NUMEL, dtype=torch.float32) % 7
            full = (pattern * 2**ctx.rank).bfloat16()
            reduction.start_inside(full).wait()
            tensor = full if reduction.keeps_full else shard_of(full, groups.shard)
            assert reduction.start_across(tensor).wait() is tensor
            update = shard_of(shard_of(full, groups.shard), groups.outer).float()
            expected = pattern * (2**4 - 1) * (2 / 4 if reduction.averages else 1)
            assert torch.equal(update, shard_of(shard_of(expected, groups.shard), groups.outer)), (options, groups)


@ranks(4, strategy="optim", instances=2)
def test_every_form_of_reduction_sums_over_both_groups(ctx: ParallelContext) -> None:
    shards_summed_everywhere(ctx)


@ranks(3, strategy="optim", threads=False)
def test_a_mean_in_fp32_and_in_bf16_is_rounded_once(ctx: ParallelContext) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for by_all_to_all in (False, True):
            got, _, rounded = reduced(ctx, dtype, averages=True, by_all_to_all=by_all_to_all)
            bound = (4 * FP32 if dtype is torch.float32 else BF16) * 1.01
            assert ((got - rounded / 3).abs() <= bound * (rounded / 3).abs() + 1e-6).all()
