"""One bucket on one rank, with collectives that finish late; reductions against fp64 sums, by
precision.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.work import Work
from nanotrain.parallel.dp import bucket as bucket_module
from nanotrain.parallel.dp.bucket import Bucket, Reduction
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.parallel.dp.options import STRATEGIES, DataParallelOptions, ReduceGroups
from nanotrain.parallel.dp.stores import (
    GradMemory,
    GradStore,
    ParamStore,
    ResidentGrads,
    TransientGrads,
    shard_of,
)
from tests.harness import ranks, run_ranks
from tests.parallel.dp.toys import Toy, local_params

GROUPS = ReduceGroups(Group.single_rank("dp_shard"), Group.single_rank("dp_replicate"))
LAYOUT = plan_layout(local_params(Toy(shapes=((7, 19), (13,), (70,)))), LayoutRules()).buckets[0]
NAMES = ["units.0.weight", "units.1.weight", "units.2.weight"]
SHAPES = dict(zip(NAMES, ((7, 19), (13,), (70,)), strict=True))
GARBAGE = 1e30


def bucket_with(grads: GradStore) -> Bucket:
    params = ParamStore(torch.zeros(LAYOUT.numel), groups=GROUPS)
    return Bucket(LAYOUT, params=params, grads=grads, reduction=Reduction(GROUPS, options_of()))


def resident() -> Bucket:
    return bucket_with(ResidentGrads(torch.full((LAYOUT.numel,), GARBAGE), groups=GROUPS))


def transient() -> Bucket:
    memory = GradMemory(LAYOUT.numel + 128, device=torch.device("cpu"), dtype=torch.float32)
    memory.tensor.fill_(GARBAGE)  # what another bucket left there
    shard = torch.full((LAYOUT.shard_numel,), GARBAGE)
    return bucket_with(
        TransientGrads(slice(64, 64 + LAYOUT.numel), shard, memory=memory, groups=GROUPS)
    )


def fill(bucket: Bucket, value: float, *, names: list[str] = NAMES) -> None:
    bucket.begin_backward()
    for name in names:
        bucket.add_grad(name, torch.full(SHAPES[name], value))


def reduce(bucket: Bucket, *, is_last: bool = True) -> None:
    bucket.start_reduce(is_last=is_last)
    bucket.finish_reduce()


def shard_with(values: dict[str, float]) -> torch.Tensor:
    expected = torch.zeros(LAYOUT.numel)
    for entry in LAYOUT.params:
        expected[entry.start : entry.stop] = values.get(entry.name, 0.0)
    return expected


@pytest.mark.parametrize("make", [resident, transient])
def test_microbatches_accumulate_and_nothing_of_the_last_step_remains(make):
    bucket = make()
    for step in (1.0, 2.0):
        # When a step has three microbatches, reduced after each (transient) or after the last,
        bucket.begin_step()
        for microbatch in range(3):
            fill(bucket, step)
            if make is transient or microbatch == 2:
                reduce(bucket, is_last=microbatch == 2)
        # then the shard holds their sum, and zero in gaps and padding, which were garbage.
        assert torch.equal(bucket.grads.shard, shard_with(dict.fromkeys(NAMES, 3 * step)))


@pytest.mark.parametrize("make", [resident, transient])
def test_a_parameter_without_a_gradient_contributes_zero(make):
    bucket = make()
    bucket.begin_step()
    fill(bucket, 1.0)
    reduce(bucket)
    # When the next step has no gradient of two parameters,
    bucket.begin_step()
    fill(bucket, 2.0, names=NAMES[:1])
    assert not bucket.is_ready
    reduce(bucket)
    # then their gradients of the last step are gone.
    assert torch.equal(bucket.grads.shard, shard_with({NAMES[0]: 2.0}))


def test_a_bucket_is_ready_when_every_gradient_of_this_backward_was_added():
    bucket = resident()
    bucket.begin_backward()
    states = []
    for name in NAMES:
        bucket.add_grad(name, torch.ones(SHAPES[name]))
        states.append(bucket.is_ready)
    assert states == [False, False, True]
    bucket.begin_backward()
    assert not bucket.is_ready


def test_bf16_gradients_accumulate_in_fp32():
    bucket = resident()
    bucket.begin_step()
    for _ in range(3):  # 1 + 2**-10 is not a bf16 number
        bucket.add_grad(NAMES[0], torch.ones(SHAPES[NAMES[0]], dtype=torch.bfloat16))
        bucket.add_grad(NAMES[0], torch.full(SHAPES[NAMES[0]], 2.0**-10, dtype=torch.bfloat16))
    assert torch.equal(
        bucket.view(NAMES[0], bucket.grads.full()), torch.full((7 * 19,), 3 * (1 + 2.0**-10))
    )


def test_microbatches_that_are_reduced_in_bf16_add_up_in_fp32_where_nothing_is_sent():
    memory = GradMemory(LAYOUT.numel, device=torch.device("cpu"), dtype=torch.bfloat16)
    shard = torch.zeros(LAYOUT.shard_numel)
    elements = slice(LAYOUT.numel)
    bucket = bucket_with(TransientGrads(elements, shard, memory=memory, groups=GROUPS))
    bucket.begin_step()
    for value in (1.0, 2.0**-10):  # their sum is not a bf16 number
        fill(bucket, value)
        reduce(bucket, is_last=value < 1)
    assert torch.equal(bucket.grads.main, shard_with(dict.fromkeys(NAMES, 1 + 2.0**-10)))


class LateReduceScatter(Work):
    """A reduce-scatter over two ranks that reads its input in `wait`, as a collective in flight
    may.
    """

    def __init__(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        super().__init__(lambda: output)
        self.output, self.tensor, self.sent = output, tensor, tensor.clone()

    def wait(self) -> None:
        assert torch.equal(self.tensor, self.sent), "a gradient in flight was overwritten"
        self.output.copy_(self.tensor[: self.output.numel()])


def late_groups(monkeypatch) -> ReduceGroups:
    """A shard group of two ranks, of which this is the first, whose collectives are
    `LateReduceScatter`.
    """
    monkeypatch.setattr(
        bucket_module,
        "start_reduce_scatter_into",
        lambda output, tensor, group, op: LateReduceScatter(output, tensor),
    )
    return ReduceGroups(SimpleNamespace(size=2, index=0), GROUPS.replicate)  # type: ignore[arg-type]


def test_a_reduction_in_flight_keeps_its_storage_and_ends_with_the_values_it_began_with(
    monkeypatch,
):
    groups = late_groups(monkeypatch)
    memory = GradMemory(LAYOUT.numel, device=torch.device("cpu"), dtype=torch.float32)
    half = LAYOUT.numel // 2
    grads = TransientGrads(slice(LAYOUT.numel), torch.zeros(half), memory=memory, groups=groups)
    params = ParamStore(torch.zeros(LAYOUT.numel), groups=groups)
    bucket = Bucket(LAYOUT, params=params, grads=grads, reduction=Reduction(groups, options_of()))
    bucket.begin_step()
    fill(bucket, 4.0)
    bucket.start_reduce(is_last=True)
    assert bucket.is_in_flight and grads.is_open
    bucket.finish_reduce()
    assert not bucket.is_in_flight and not grads.is_open
    assert torch.equal(bucket.grads.shard, shard_with(dict.fromkeys(NAMES, 4.0))[:half])


NUMEL = 4 * 3 * 128
BF16, FP16, FP32 = 2.0**-8, 2.0**-11, 2.0**-24  # largest relative error of one rounding


def grads_of(rank: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def options_of(**options: Any) -> DataParallelOptions:
    return DataParallelOptions(STRATEGIES["optim"], **options)


def groups_of(ctx: ParallelContext, *, shards_across: bool = False) -> ReduceGroups:
    return ReduceGroups(
        ctx.group("dp_shard"), ctx.group("dp_replicate"), shards_across=shards_across
    )


def reduced(
    ctx: ParallelContext, dtype: torch.dtype, **options: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's shard as the collective sums it, the fp64 sums of the exact and of the rounded
    gradients.
    """
    group, full = ctx.group("dp_shard"), grads_of(ctx.rank).to(dtype)
    Reduction(groups_of(ctx), options_of(**options)).start_inside(full).wait()
    exact = sum(grads_of(rank) for rank in range(group.size))
    rounded = sum(grads_of(rank).to(dtype).double() for rank in range(group.size))
    return shard_of(full, group).double(), shard_of(exact, group), shard_of(rounded, group)


def errors(ctx: ParallelContext) -> dict[str, float]:
    """Largest errors against the fp64 sum, relative to the sum of magnitudes."""
    group = ctx.group("dp_shard")
    magnitude = shard_of(sum(grads_of(rank).abs() for rank in range(group.size)), group)
    error_of = {}
    for name, dtype, options in (
        ("fp32", torch.float32, {}),
        ("bf16", torch.bfloat16, {}),
        ("bf16 all-reduce", torch.bfloat16, {"keeps_full_grads": True}),
        ("bf16 all-to-all", torch.bfloat16, {"by_all_to_all": True}),
        ("fp16 all-to-all", torch.float16, {"by_all_to_all": True}),
    ):
        got, exact, rounded = reduced(ctx, dtype, **options)
        error_of[name] = ((got - exact).abs() / magnitude).max().item()
        if options.get("by_all_to_all"):
            assert torch.equal(got, rounded.float().to(dtype).double()), "rounded more than once"
    return error_of


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_error_of_a_reduction_is_that_of_its_precision(size: int) -> None:
    for error_of in run_ranks(size, errors, strategy="optim"):
        assert error_of["fp32"] < size * 2 * FP32
        # one rounding of every input, one of the sum
        assert 100 * error_of["fp32"] < error_of["bf16"] < 2 * BF16
        assert error_of["bf16 all-to-all"] < 2 * BF16 and error_of["fp16 all-to-all"] < 2 * FP16
        assert error_of["bf16 all-reduce"] < (size + 1) * BF16  # rounded after every addition


def shards_summed_everywhere(ctx: ParallelContext) -> None:
    """Integers, so that every dtype and order gives the same sums."""
    for shards_across in (False, True):
        for options in (
            {},
            {"keeps_full_grads": True},
            {"by_all_to_all": True},
            {"averages": True, "grad_scale": 2.0},
        ):
            groups = groups_of(ctx, shards_across=shards_across)
            reduction = Reduction(groups, options_of(**options))
            pattern = torch.arange(NUMEL, dtype=torch.float32) % 7
            full = (pattern * 2**ctx.rank).bfloat16()
            reduction.start_inside(full).wait()
            tensor = full if reduction.keeps_full else shard_of(full, groups.shard)
            assert reduction.start_across(tensor).wait() is tensor
            update = shard_of(shard_of(full, groups.shard), groups.outer).float()
            expected = pattern * (2**4 - 1) * (2 / 4 if "averages" in options else 1)
            assert torch.equal(update, shard_of(shard_of(expected, groups.shard), groups.outer)), (
                options,
                groups,
            )


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
