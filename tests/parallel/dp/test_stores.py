"""Parameter and gradient stores of a bucket."""

import torch

from nanotrain.comm.group import Group
from nanotrain.parallel.dp.options import STRATEGIES, DataParallelOptions, ReduceGroups
from nanotrain.parallel.dp.stores import (
    GradMemory,
    ParamStore,
    ResidentGrads,
    TransientGrads,
    build_grads,
    build_params,
    shard_of,
)
from nanotrain.precision.dtypes import Precision
from tests.harness import ranks
from tests.parallel.dp.toys import NUM_BUCKETS, Toy, layout_of

SINGLE = ReduceGroups(Group.single_rank("dp_shard"), Group.single_rank("dp_replicate"))
NUMEL = 192
CPU = torch.device("cpu")


def memory_of(numel: int = NUMEL) -> GradMemory:
    return GradMemory(numel, device=CPU, dtype=torch.float32)


def test_full_size_memory_is_borrowed_from_the_first_write_to_the_reduction_and_used_again():
    memory, shards = memory_of(NUMEL + 64), torch.zeros(3, NUMEL)
    places = (slice(0, NUMEL), slice(NUMEL, NUMEL + 64), slice(64, 64 + NUMEL))
    first, second, third = (
        TransientGrads(place, shard[: place.stop - place.start], memory=memory, groups=SINGLE)
        for place, shard in zip(places, shards, strict=True)
    )
    for store in (first, second, first):
        assert not store.is_open
        assert (
            store.full().data_ptr() == memory.tensor[store._elements].data_ptr() and store.is_open
        )
        store.finish_inside(is_first=True)
        assert not store.is_open
    assert (
        first.overlaps(first)
        and first.overlaps(third)
        and third.overlaps(second)
        and not first.overlaps(second)
    )


def test_a_transient_store_overwrites_the_last_step_and_accumulates_within_one():
    store = TransientGrads(
        slice(NUMEL), torch.full((NUMEL,), 1e30), memory=memory_of(), groups=SINGLE
    )
    for step in (1.0, 5.0):
        for microbatch in range(3):
            store.full().fill_(step)
            store.finish_inside(is_first=microbatch == 0)
        assert torch.equal(store.shard, torch.full((NUMEL,), 3 * step))


@ranks(3, strategy="optim", shares=True)
def test_a_resident_shard_is_a_view_of_the_full_gradients(ctx):
    groups = ReduceGroups(ctx.group("dp_shard"), ctx.group("dp_replicate"))
    full = torch.arange(NUMEL, dtype=torch.float32)
    store = ResidentGrads(full, groups=groups)
    assert torch.equal(store.shard, full[64 * ctx.rank : 64 * (ctx.rank + 1)])
    assert store.full() is full and store.is_open
    store.finish_inside(is_first=True)
    assert shard_of(full, groups.shard).data_ptr() == store.shard.data_ptr()


@ranks(2, strategy="optim", shares=True)
def test_resident_params_are_complete_after_the_wait(ctx):
    params = ParamStore(
        torch.zeros(NUMEL), groups=ReduceGroups(ctx.group("dp_shard"), ctx.group("dp_replicate"))
    )
    params.shard.fill_(ctx.rank + 1)
    assert not params.gathers
    params.start_all_gather()
    assert params.gathers
    params.wait()
    assert not params.gathers
    assert params.full.chunk(2)[0].eq(1).all() and params.full.chunk(2)[1].eq(2).all()
    params.wait()  # without a gather there is nothing to wait for


GROUPS = ReduceGroups(Group.single_rank("dp_shard"), Group.single_rank("dp_replicate"))


def test_parameter_stores_share_the_buffer_unless_they_are_sharded():
    layout = layout_of(Toy())
    buffer = torch.arange(float(layout.numel))
    updates = torch.zeros(layout.numel)
    resident = build_params(
        layout,
        buffer,
        groups=GROUPS,
        options=DataParallelOptions(STRATEGIES["optim"]),
        update_buffer=updates,
    )
    assert (
        torch.equal(torch.cat([store.full for store in resident]), buffer)
        and len(resident) == NUM_BUCKETS
    )
    assert all(store.full.untyped_storage().data_ptr() == buffer.data_ptr() for store in resident)
    assert all(
        store.update.untyped_storage().data_ptr() == updates.data_ptr() for store in resident
    )
    sharded = build_params(
        layout, buffer, groups=GROUPS, options=DataParallelOptions(STRATEGIES["optim_grads_params"])
    )
    assert torch.equal(torch.cat([store.shard for store in sharded]), buffer)
    assert not any(store.has_storage for store in sharded)


def test_gradient_stores_have_their_storage_or_borrow_it():
    layout, precision = layout_of(Toy()), Precision(params=torch.bfloat16)
    for is_transient, kind in ((False, ResidentGrads), (True, TransientGrads)):
        stores = build_grads(
            layout, groups=GROUPS, precision=precision, device=CPU, is_transient=is_transient
        )
        fulls = [store.full() for store in stores]
        assert all(isinstance(store, kind) for store in stores)
        assert [full.numel() for full in fulls] == [bucket.numel for bucket in layout.buckets]
        assert {full.dtype for full in fulls} == {precision.grads} == {torch.float32}
        assert len({full.untyped_storage().data_ptr() for full in fulls}) == 1
