"""Parts of a shard cover it, and their planned bytes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.config import OptimConfig
from nanotrain.optim.optimizers import OPTIMIZERS
from nanotrain.optim.parts import clip_range, split_shard, state_bytes
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.precision.policy import Precision
from tests.parallel.dp.toys import Toy, local_params

MUON, ADAM = OPTIMIZERS["muon"], OPTIMIZERS["adam"]


def buckets(num_shards: int, bucket_size: int = 200):
    return plan_layout(local_params(Toy()), LayoutRules(num_shards=num_shards, bucket_size=bucket_size)).buckets


@given(st.integers(1, 7), st.integers(1, 900), st.sampled_from(["adam", "muon"]))
def test_parts_cover_the_shard_in_order_and_hold_every_range_of_their_kind(num_shards, bucket_size, name):
    rule = OPTIMIZERS[name]
    for bucket in buckets(num_shards, bucket_size):
        for shard in range(num_shards):
            parts = split_shard(bucket.shard_ranges(shard), bucket.shard_numel, rule=rule)
            assert parts[0].start == 0 and parts[-1].stop == bucket.shard_numel
            assert all(one.stop == other.start for one, other in zip(parts, parts[1:], strict=False))
            assert tuple(r for part in parts for r in part.ranges) == bucket.shard_ranges(shard)
            for part in parts:
                assert all(part.start <= r.shard_start and r.elements.stop <= part.stop for r in part.ranges)
                kinds = {rule.matrix is not None and r.param.spec.needs_whole_matrix for r in part.ranges}
                assert kinds <= {part.is_matrix}


def test_a_rule_without_matrices_has_one_part():
    assert [len(split_shard(bucket.shard_ranges(0), bucket.numel, rule=ADAM)) for bucket in buckets(1)] == [1, 1, 1]
    assert max(len(split_shard(bucket.shard_ranges(0), bucket.numel, rule=MUON)) for bucket in buckets(1, 10**6)) > 2


@given(st.integers(1, 7), st.floats(0, 1), st.sampled_from(["adam", "muon"]))
def test_a_fraction_of_every_shard_is_on_the_host(num_shards, fraction, name):
    rule = OPTIMIZERS[name]
    for bucket in buckets(num_shards):
        ranges = bucket.shard_ranges(num_shards - 1)
        parts = split_shard(ranges, bucket.shard_numel, rule=rule, host_fraction=fraction)
        assert sum(part.numel for part in parts if part.on_host) == int(fraction * bucket.shard_numel)
        assert parts[0].start == 0 and parts[-1].stop == bucket.shard_numel
        assert all(one.stop == other.start for one, other in zip(parts, parts[1:], strict=False))
        assert sum(r.numel for part in parts for r in part.ranges) == sum(r.numel for r in ranges)


def test_a_range_is_clipped():
    (bucket, *_) = buckets(1)
    part = bucket.shard_ranges(0)[1]
    clipped = clip_range(part, start=part.shard_start + 3, stop=part.elements.stop - 2)
    assert (clipped.param_start, clipped.numel) == (part.param_start + 3, part.numel - 5)
    assert clip_range(part, start=0, stop=part.shard_start) is None


def test_bytes_by_rule_and_dtype():
    config, total = OptimConfig(), sum(bucket.numel for bucket in buckets(1))
    parts = [part for bucket in buckets(1) for part in split_shard(bucket.shard_ranges(0), bucket.numel, rule=ADAM)]
    fp32, bf16 = Precision(params=torch.float32), Precision(params=torch.bfloat16)
    assert state_bytes(parts, ADAM, config=config, precision=fp32) == 8 * total
    assert state_bytes(parts, ADAM, config=config, precision=bf16) == 12 * total
    small = Precision(params=torch.bfloat16, main=torch.bfloat16, exp_avg=torch.bfloat16, exp_avg_sq=torch.bfloat16)
    assert state_bytes(parts, ADAM, config=config, precision=small) == 4 * total
    assert state_bytes(parts, OPTIMIZERS["lion"], config=config, precision=fp32) == 4 * total
    parts = [part for bucket in buckets(1) for part in split_shard(bucket.shard_ranges(0), bucket.numel, rule=MUON)]
    matrices = sum(part.numel for part in parts if part.is_matrix)
    assert 0 < matrices < total
    assert state_bytes(parts, MUON, config=config, precision=fp32) == 4 * matrices + 8 * (total - matrices)
