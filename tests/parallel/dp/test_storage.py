"""Stores of all buckets lie in one buffer each, in the order of the layout."""

import torch

from nanotrain.comm.group import Group
from nanotrain.parallel.dp.reduction import ReduceGroups
from nanotrain.parallel.dp.storage import build_grads, build_params
from nanotrain.parallel.dp.stores import ResidentGrads, TransientGrads
from nanotrain.precision.policy import Precision
from tests.parallel.dp.toys import NUM_BUCKETS, Toy, layout_of

GROUPS = ReduceGroups(Group.single_rank("dp_shard"), Group.single_rank("dp_replicate"))
CPU = torch.device("cpu")


def test_parameter_stores_share_the_buffer_unless_they_are_sharded():
    layout = layout_of(Toy())
    buffer = torch.arange(float(layout.numel))
    updates = torch.zeros(layout.numel)
    resident = build_params(layout, buffer, groups=GROUPS, is_sharded=False, update_buffer=updates)
    assert torch.equal(torch.cat([store.full for store in resident]), buffer) and len(resident) == NUM_BUCKETS
    assert all(store.full.untyped_storage().data_ptr() == buffer.data_ptr() for store in resident)
    assert all(store.update.untyped_storage().data_ptr() == updates.data_ptr() for store in resident)
    sharded = build_params(layout, buffer, groups=GROUPS, is_sharded=True)
    assert torch.equal(torch.cat([store.shard for store in sharded]), buffer)
    assert not any(store.has_storage for store in sharded)


def test_gradient_stores_have_their_storage_or_borrow_it():
    layout, precision = layout_of(Toy()), Precision(params=torch.bfloat16)
    for is_transient, kind in ((False, ResidentGrads), (True, TransientGrads)):
        stores = build_grads(layout, groups=GROUPS, precision=precision, device=CPU, is_transient=is_transient)
        fulls = [store.full() for store in stores]
        assert all(isinstance(store, kind) for store in stores)
        assert [full.numel() for full in fulls] == [bucket.numel for bucket in layout.buckets]
        assert {full.dtype for full in fulls} == {precision.grads} == {torch.float32}
        assert len({full.untyped_storage().data_ptr() for full in fulls}) == (NUM_BUCKETS if is_transient else 1)
