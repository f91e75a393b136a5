"""The data-parallel wrapper on one to five ranks: exact sums, order, memory, and waiting for
parameters.
"""

import gc
from functools import partial

import pytest
import torch
from torch import nn

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.parallel import ParallelConfig
from nanotrain.parallel.dp.data_parallel import MAX_REDUCTIONS, DataParallel
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.parallel.dp.options import STRATEGIES, DataParallelOptions
from nanotrain.parallel.dp.param_buffer import gathered
from nanotrain.parallel.dp.stores import TransientGrads
from nanotrain.parallel.dp.units import unit_modules
from nanotrain.precision.dtypes import Precision
from nanotrain.topology.topology import Topology
from tests.happens_before import recorded_world
from tests.harness import parallel_config, ranks, run_ranks
from tests.parallel.dp.test_bucket import late_groups
from tests.parallel.dp.toys import (
    BUCKET_SIZE,
    NUM_BUCKETS,
    RESIDENT_STRATEGIES,
    SHAPES,
    Toy,
    assert_shards,
    backward,
    groups_of,
    layout_of,
    local_params,
    numel_of,
    pattern_of,
    wrap,
)

SETTINGS = [(strategy, overlap) for strategy in RESIDENT_STRATEGIES for overlap in (False, True)]


def patterns(stage: Toy, factor: float) -> dict[str, torch.Tensor]:
    return {name: pattern_of(p) * factor for name, p in stage.named_parameters()}


def reduce_two_steps(
    ctx: ParallelContext, parallel: DataParallel, stage: Toy, *, num_microbatches: int
) -> None:
    """Gradient 2**rank times a pattern on every parameter: no sum but the right one has all bits of
    the ranks set.
    """
    for step in (1, 2):  # the second finds what the first left behind
        ctx.traffic.reset()
        parallel.begin_step()
        for microbatch in range(num_microbatches):
            loss = stage(2.0**ctx.rank * step * (microbatch + 1))
            backward(parallel, loss, is_last=microbatch == num_microbatches - 1)
        parallel.finish_grad_reduce()
        of_microbatches = num_microbatches * (num_microbatches + 1) // 2
        assert_shards(
            parallel, patterns(stage, (2**ctx.topology.world_size - 1) * step * of_microbatches)
        )


def reduce_two_to_the_rank(ctx):
    """Exact sums with every strategy, with and without overlap."""
    for strategy, overlap in SETTINGS:
        stage = Toy()
        parallel = wrap(ctx, stage, strategy=strategy, overlap=overlap)
        assert len(parallel.buckets) == NUM_BUCKETS
        assert all(b.layout.stop > b.layout.params[-1].stop for b in parallel.buckets)
        for num_microbatches in (3, 1):
            reduce_two_steps(ctx, parallel, stage, num_microbatches=num_microbatches)
        assert all(p.grad is None for p in stage.parameters())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
def test_two_to_the_rank_reduces_to_the_exact_sum_in_every_strategy(num_ranks):
    run_ranks(num_ranks, reduce_two_to_the_rank, strategy="optim", shares=True)


@ranks(3, strategy="optim", shares=True)
def test_parameters_without_a_gradient_on_some_ranks_contribute_zero_and_no_rank_hangs(ctx):
    for strategy, overlap in SETTINGS:
        stage = Toy()
        parallel = wrap(ctx, stage, strategy=strategy, overlap=overlap)
        # Given a step in which every parameter has a gradient,
        parallel.begin_step()
        backward(parallel, stage(1e6))
        parallel.finish_grad_reduce()
        # when in the next each rank leaves out another unit, the last unit is left out everywhere,
        # and in the second microbatch rank 1 leaves out all but one,
        used = [index for index in range(5) if index != ctx.rank]
        parallel.begin_step()
        backward(parallel, stage(1.0, used), is_last=False)
        backward(parallel, stage(1.0, [3] if ctx.rank == 1 else range(5)))
        parallel.finish_grad_reduce()
        # then sums are over those that used it.
        counts = {0: 4, 1: 4, 2: 4, 3: 6, 4: 5, 5: 0}
        grads = {
            f"units.{i}.weight": pattern_of(stage.units[i].weight) * count
            for i, count in counts.items()
        }
        assert_shards(parallel, grads)


def launched_buckets(ctx) -> dict[str, list[int]]:
    """Order in which buckets are reduced, with gradients ready in another order on every rank."""
    launched = {}
    for strategy in RESIDENT_STRATEGIES:
        stage = Toy()
        parallel = wrap(ctx, stage, strategy=strategy, overlap=True)
        launched[strategy] = []
        record_launches(parallel, into=launched[strategy])
        order = [(index * (ctx.rank + 1) + ctx.rank) % 7 for index in range(7)]
        parallel.begin_step()
        backward(parallel, stage(1.0, [index for index in order if index < len(SHAPES)]))
        parallel.finish_grad_reduce()
        assert_shards(parallel, patterns(stage, ctx.topology.world_size))
    return launched


def record_launches(parallel: DataParallel, *, into: list[int]) -> None:
    def record(index: int, start, *, is_last: bool) -> None:
        into.append(index)
        start(is_last=is_last)

    for index, bucket in enumerate(parallel.buckets):
        bucket.start_reduce = partial(record, index, bucket.start_reduce)


def test_buckets_are_reduced_in_buffer_order_in_any_order_of_gradients():
    launched = run_ranks(4, launched_buckets, strategy="optim", shares=True)
    assert launched == [dict.fromkeys(RESIDENT_STRATEGIES, list(range(NUM_BUCKETS)))] * 4


@ranks(1, shares=True)
def test_overlap_reduces_a_bucket_before_the_backward_pass_has_ended(ctx):
    for strategy, overlap in SETTINGS:
        stage, seen = Toy(), []
        parallel = wrap(ctx, stage, strategy=strategy, overlap=overlap)
        record_launches(parallel, into=seen)
        launched_early = []
        stage.units[0].weight.register_hook(
            lambda grad, seen=seen, early=launched_early: early.append(len(seen))
        )
        parallel.begin_step()
        for is_last in (False, True):
            backward(parallel, stage(1.0), is_last=is_last)
        parallel.finish_grad_reduce()
        # Then optim_grads reduces during every backward, the others during the last one if
        # reductions overlap.
        every, last = [NUM_BUCKETS - 1, 2 * NUM_BUCKETS - 1], [0, NUM_BUCKETS - 1]
        assert launched_early == (
            every if strategy == "optim_grads" else last if overlap else [0, 0]
        )


def reductions_in_flight(parallel, stage):
    """How many are in flight after each one that a step starts."""
    together = []
    for bucket in parallel.buckets:

        def start(start=bucket.start_reduce, *, is_last):
            start(is_last=is_last)
            together.append(sum(b.is_in_flight for b in parallel.buckets))

        bucket.start_reduce = start
    parallel.begin_step()
    backward(parallel, stage(1.0))
    parallel.finish_grad_reduce()
    assert len(together) == NUM_BUCKETS > MAX_REDUCTIONS
    return together


@ranks(2, strategy="optim", threads=False)
def test_no_more_than_two_reductions_are_in_flight_on_gloo(ctx):
    for strategy, overlap in SETTINGS:
        stage = Toy()
        parallel = wrap(ctx, stage, strategy=strategy, overlap=overlap)
        assert max(reductions_in_flight(parallel, stage)) <= MAX_REDUCTIONS
        assert_shards(parallel, patterns(stage, 2.0))


def test_elsewhere_all_reductions_of_resident_gradients_may_be_in_flight():
    topology = Topology.of(parallel_config(strategy="optim"), 2)
    with recorded_world(topology, 0) as (ctx, recorder):
        for strategy in ("no_shard", "optim", "optim_grads"):
            stage = Toy()
            together = reductions_in_flight(
                wrap(ctx, stage, strategy=strategy, overlap=True), stage
            )
            assert max(together) == (MAX_REDUCTIONS if strategy == "optim_grads" else NUM_BUCKETS)
        recorder.finish()


def test_a_gradient_in_flight_is_not_overwritten_by_the_next_microbatch(monkeypatch):
    # Given reductions that are still reading when the next microbatch comes,
    stage, groups = Toy(), late_groups(monkeypatch)
    parallel = DataParallel(
        stage,
        layout_of(stage, num_shards=2),
        groups=groups,
        options=DataParallelOptions(STRATEGIES["optim_grads"], overlap_grad_reduce=True),
        precision=Precision(params=torch.float32),
        device=torch.device("cpu"),
    )
    # when three microbatches follow each other, whose gradients are ready in different orders,
    parallel.begin_step()
    for microbatch, order in enumerate(
        ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 4, 1, 5, 3])
    ):
        backward(parallel, stage(1.0 + microbatch, order), is_last=microbatch == 2)
    parallel.finish_grad_reduce()
    # then no gradient was overwritten in flight, and the sums are right.
    assert_shards(parallel, patterns(stage, 6.0))


def single_rank() -> ParallelContext:
    return ParallelContext.attach(Topology.of(ParallelConfig(), 1))


def wrap_alone(strategy: str, *, overlap: bool = False, dtype: torch.dtype = torch.float32):
    stage = Toy(dtype=dtype)
    return stage, wrap(single_rank(), stage, strategy=strategy, overlap=overlap, dtype=dtype)


def held_bytes() -> int:
    """Bytes of all tensor storage reachable from Python and allocated after `gc.freeze`."""
    storages = {}
    for tensor in gc.get_objects():
        if type(tensor) in (torch.Tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_of(ctx, strategy: str, *, overlap: bool, shapes: list[tuple[int, ...]]) -> int:
    """Peak storage over the gradient hooks of two microbatches."""
    gc.collect()
    gc.freeze()  # skip the hundred thousand objects of the imports in every hook
    peaks = []
    stage = Toy(shapes=shapes)
    parallel = wrap(ctx, stage, strategy=strategy, overlap=overlap, bucket_size=20_000)
    assert len(parallel.buckets) == len(shapes)
    for unit in stage.units:  # one whose graph holds nothing
        unit.forward = lambda scale, unit=unit: unit.weight.sum() * scale
    for param in stage.parameters():
        param.register_post_accumulate_grad_hook(lambda _: peaks.append(held_bytes()))
    parallel.begin_step()
    for is_last in (False, True):
        backward(parallel, stage(1.0), is_last=is_last)
    parallel.finish_grad_reduce()
    if strategy == "optim_grads":
        (memory,) = {
            bucket.grads._memory
            for bucket in parallel.buckets
            if isinstance(bucket.grads, TransientGrads)
        }
        assert memory.tensor.numel() == 2 * parallel.buckets[0].layout.numel
    return max(peaks)


@ranks(2, strategy="optim", threads=False)
def test_optim_grads_never_holds_a_full_size_gradient(ctx):
    numel, num_params = 150 * 140, 8
    shapes = [(150, 140)] * num_params
    # gloo receives half a bucket for each reduction in flight.
    peaks = {
        (s, o): peak_of(ctx, s, overlap=o, shapes=shapes)
        for s in ("optim_grads", "optim")
        for o in (False, True)
    }
    bucket = 4 * 21120  # bytes of a padded fp32 bucket
    full, one_grad, received, scalars = num_params * bucket, 4 * numel, 2 * bucket // 2, 1000
    for overlap in (False, True):
        assert peaks["optim", overlap] >= 2 * full
        assert (
            peaks["optim_grads", overlap]
            <= full + full / 2 + 2 * bucket + one_grad + received + scalars
        )


@ranks(2, strategy="optim", shares=True)
def test_a_forward_pass_waits_for_the_parameters_of_its_unit_only(ctx):
    # Given shards that every rank has set to its rank + 1, whose all-gather has started,
    stage = Toy()
    parallel = wrap(ctx, stage, strategy="optim", overlap=True)
    for bucket in parallel.buckets:
        bucket.params.shard.fill_(ctx.rank + 1)
    parallel.start_param_gather()
    waiting = [bucket for bucket in parallel.buckets if bucket.params.gathers]
    assert len(waiting) == NUM_BUCKETS
    # when the units run one after the other,
    for name, unit in unit_modules(stage):
        unit(1.0)
        # then the unit's weight is complete, half of its bucket from either rank,
        (bucket,) = [
            b
            for b in parallel.buckets
            for entry in b.layout.params
            if entry.name == f"{name}.weight"
        ]
        assert not bucket.params.gathers
        of_rank_0, of_rank_1 = bucket.params.full.chunk(2)
        assert (of_rank_0 == 1).all() and (of_rank_1 == 2).all()
    # and a step without a forward of a unit waits for its parameters before the optimizer updates
    # them.
    parallel.start_param_gather()
    parallel.begin_step()
    backward(parallel, stage(1.0, [0]))
    assert any(bucket.params.gathers for bucket in parallel.buckets)
    parallel.finish_grad_reduce()
    assert not any(bucket.params.gathers for bucket in parallel.buckets)


@ranks(2, strategy="optim", shares=True)
def test_inside_gathered_all_parameters_are_complete(ctx):
    wrappers = [wrap(ctx, Toy(), strategy="optim", overlap=True) for _ in range(2)]
    for wrapper in wrappers:
        for bucket in wrapper.buckets:
            bucket.params.shard.fill_(ctx.rank + 1)
        wrapper.start_param_gather()
    with gathered(wrappers):
        for wrapper in wrappers:
            for bucket in wrapper.buckets:
                assert (
                    bucket.params.full.chunk(2)[0].eq(1).all()
                    and bucket.params.full.chunk(2)[1].eq(2).all()
                )


@ranks(2, strategy="optim", shares=True)
def test_without_overlap_parameters_are_complete_on_return(ctx):
    parallel = wrap(ctx, Toy(), strategy="optim_grads")
    for bucket in parallel.buckets:
        bucket.params.shard.fill_(ctx.rank + 1)
    parallel.start_param_gather()
    for bucket in parallel.buckets:
        assert (
            bucket.params.full.chunk(2)[0].eq(1).all()
            and bucket.params.full.chunk(2)[1].eq(2).all()
        )


def test_the_last_bucket_is_gathered_first():
    _, parallel = wrap_alone("optim", overlap=True)
    started = []
    for index, bucket in enumerate(parallel.buckets):
        bucket.params.start_all_gather = lambda index=index: started.append(index)
    parallel.start_param_gather()
    assert started == list(reversed(range(NUM_BUCKETS)))  # it holds the first layers


def test_parameters_become_views_of_one_buffer_and_keep_their_shapes():
    stage, parallel = wrap_alone("no_shard")
    assert [tuple(p.shape) for p in stage.parameters()] == list(SHAPES)
    parallel.param_buffer.fill_(3.0)
    assert all((p == 3.0).all() for p in stage.parameters())
    assert parallel.layout.numel > numel_of()


def test_a_stage_on_the_meta_device_gets_storage():
    with torch.device("meta"):
        stage = Toy()
    wrap(single_rank(), stage, strategy="no_shard")
    assert all(p.device.type == "cpu" and (p == 0).all() for p in stage.parameters())


def test_bf16_parameters_have_fp32_gradients():
    stage, parallel = wrap_alone("optim_grads", dtype=torch.bfloat16)
    parallel.begin_step()
    for index in range(3):  # 256 + 1 + 1 is 256 in bf16
        backward(parallel, stage([256.0, 1.0, 1.0][index]), is_last=index == 2)
    parallel.finish_grad_reduce()
    assert all(bucket.grads.shard.dtype is torch.float32 for bucket in parallel.buckets)
    assert_shards(parallel, patterns(stage, 258.0))
    assert all(p.dtype is torch.bfloat16 for p in stage.parameters())


@ranks(1, shares=True)
def test_one_rank_sends_nothing(ctx):
    for strategy in RESIDENT_STRATEGIES:
        stage = Toy()
        parallel = wrap(ctx, stage, strategy=strategy)
        parallel.begin_step()
        backward(parallel, stage(1.0))
        parallel.finish_grad_reduce()
        parallel.start_param_gather()
    assert ctx.traffic.calls() == 0


def test_a_unit_without_parameters_waits_for_those_that_are_tied():
    # Given a stage whose head has no weight of its own, and whose first unit's weight is tied,
    stage = Toy()
    stage.head = nn.Identity()
    stage.head.reads_shared = True
    options = DataParallelOptions(STRATEGIES["optim"], overlap_param_gather=True)
    parallel = DataParallel(
        stage,
        plan_layout(
            local_params(stage, tied=["units.0.weight"]), LayoutRules(bucket_size=BUCKET_SIZE)
        ),
        groups=groups_of(single_rank(), "optim"),
        options=options,
        precision=Precision(params=torch.float32),
        device=torch.device("cpu"),
    )
    waited = []
    for index, bucket in enumerate(parallel.buckets):
        bucket.params.wait = lambda index=index: waited.append(index)
    # when the head runs, it waits for the last bucket, where the tied weight is alone.
    stage.head(torch.ones(1))
    assert waited == [len(parallel.buckets) - 1]
    assert [entry.name for entry in parallel.buckets[-1].layout.params] == ["units.0.weight"]
