"""The layout against Megatron-LM's worked examples, and the laws of every layout."""

import math
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.parallel.dp.layout import (
    BUCKET_ALIGNMENT,
    PARAM_ALIGNMENT,
    BufferLayout,
    LayoutRules,
    plan_layout,
)
from nanotrain.spec.boxes import Box
from nanotrain.spec.params import LocalParam, Normal, ParamSpec


def params(*shapes: tuple[int, ...], tied: tuple[int, ...] = ()) -> list[LocalParam]:
    """Parameters named by their place, in registration order."""
    return [
        LocalParam(
            ParamSpec(
                f"p{index}",
                shape,
                dtype="bf16",
                init=Normal(0.02),
                weight_decay=True,
                is_shared=index in tied,
            ),
            Box.full(shape),
        )
        for index, shape in enumerate(shapes)
    ]


def ends(layout: BufferLayout) -> list[tuple[int, int]]:
    return [(bucket.start, bucket.stop) for bucket in layout.buckets]


def unpadded(layout: BufferLayout) -> list[int]:
    return [bucket.params[-1].stop - bucket.start for bucket in layout.buckets]


def names_in(layout: BufferLayout) -> list[list[str]]:
    return [[entry.name for entry in bucket.params] for bucket in layout.buckets]


def test_three_small_parameters_as_worked_out():
    # Given parameters of 100, 50 and 300 elements, two shards, buckets that close at 128 elements,
    layout = plan_layout(params((100,), (50,), (300,)), LayoutRules(num_shards=2, bucket_size=128))
    # then the last comes first, alone, and the others follow at multiples of 64.
    assert ends(layout) == [(0, 384), (384, 640)]
    assert unpadded(layout) == [300, 164]
    ranges = [
        [(entry.name, entry.start, entry.stop) for entry in bucket.params]
        for bucket in layout.buckets
    ]
    assert ranges == [[("p2", 0, 300)], [("p1", 384, 434), ("p0", 448, 548)]]


def test_ten_matrices_in_one_bucket_as_worked_out():
    layout = plan_layout(params(*[(95, 95)] * 10), LayoutRules(num_shards=8))
    assert ends(layout) == [(0, 90880)]
    assert unpadded(layout) == [90817]


def test_ten_matrices_in_four_buckets_as_worked_out():
    layout = plan_layout(params(*[(95, 95)] * 10), LayoutRules(num_shards=8, bucket_size=20000))
    assert [bucket.numel for bucket in layout.buckets] == [27264, 27264, 27264, 9088]
    assert unpadded(layout) == [27201, 27201, 27201, 9025]


def test_padding_for_busbw_rounds_every_bucket_up_to_65536():
    rules = LayoutRules(num_shards=8, bucket_size=20000, pad_for_high_busbw=True)
    layout = plan_layout(params(*[(95, 95)] * 10), rules)
    assert [bucket.numel for bucket in layout.buckets] == [65536] * 4
    assert unpadded(layout) == [27201, 27201, 27201, 9025]  # what lies in them stays the same


def test_a_shard_count_that_is_no_power_of_two_divides_every_bucket():
    rules = LayoutRules(num_shards=6, bucket_size=20000, pad_for_high_busbw=True)
    assert rules.bucket_alignment == 3 * 65536
    assert LayoutRules(num_shards=5).bucket_alignment == LayoutRules(1, 5).bucket_alignment == 640


@pytest.mark.parametrize(
    ("num_shards", "size"), [(1, 40_000_000), (40, 40_000_000), (64, 64_000_000)]
)
def test_the_default_bucket_size_grows_with_the_shards(num_shards, size):
    assert LayoutRules(num_shards=num_shards).closing_size == size


def test_a_tied_embedding_sits_alone_in_its_bucket():
    # Given a tied embedding, registered first or in the middle, and buckets too large to close by
    # themselves,
    first = plan_layout(params((100,), (50,), (300,), tied=(0,)), LayoutRules(num_shards=2))
    middle = plan_layout(params((100,), (50,), (300,), tied=(1,)), LayoutRules(num_shards=2))
    # then it shares its bucket with nobody.
    assert names_in(first) == [["p2", "p1"], ["p0"]]
    assert names_in(middle) == [["p2"], ["p1"], ["p0"]]
    assert ends(first) == [(0, 384), (384, 512)]


def test_a_layout_of_nothing_has_no_buckets():
    assert plan_layout([], LayoutRules()).numel == 0


def in_units(*units: str) -> list[LocalParam]:
    return [
        LocalParam.unsharded(replace(param.spec, unit=unit))
        for param, unit in zip(params(*[(10, 10)] * len(units)), units, strict=True)
    ]


def test_a_strategy_that_gathers_by_unit_has_no_bucket_across_units():
    params = in_units("embedding", "layers.0", "layers.0", "layers.1")
    # Given buckets large enough for all parameters, they end at unit borders by request only,
    assert names_in(plan_layout(params, LayoutRules())) == [["p3", "p2", "p1", "p0"]]
    by_unit = LayoutRules(num_shards=3, gathers_by_unit=True)
    assert names_in(plan_layout(params, by_unit)) == [["p3"], ["p2", "p1"], ["p0"]]
    assert plan_layout(params, by_unit).numel == 3 * 384
    # and inside a unit the bucket size still applies.
    small = LayoutRules(bucket_size=50, gathers_by_unit=True)
    assert len(plan_layout(params, small).buckets) == 4


def test_the_params_of_a_layout_are_in_registration_order():
    given_params = params((100,), (50,), (300,))
    assert plan_layout(given_params, LayoutRules(bucket_size=128)).params == tuple(given_params)


def test_update_ranges_are_the_param_ranges_in_a_shard():
    # Given the worked example, of which each rank owns half of each bucket: 192 and 128 elements,
    first, second = plan_layout(
        params((100,), (50,), (300,)), LayoutRules(num_shards=2, bucket_size=128)
    ).buckets
    ranges = [
        [
            (part.name, part.start, part.param_start, part.numel)
            for part in bucket.update_ranges(rank)
        ]
        for bucket in (first, second)
        for rank in (0, 1)
    ]
    assert ranges == [
        [("p2", 0, 0, 192)],
        [("p2", 0, 192, 108)],
        [("p1", 0, 0, 50), ("p0", 64, 0, 64)],
        [("p0", 0, 64, 36)],
    ]


shapes = st.lists(
    st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12
)
rules = st.builds(
    LayoutRules,
    num_shards=st.integers(1, 9),
    bucket_size=st.integers(1, 4000),
    pad_for_high_busbw=st.booleans(),
)


@given(shapes, rules, st.integers(-1, 11))
def test_buckets_lie_back_to_back_and_end_where_all_shards_are_equal(shapes, rules, tied):
    layout = plan_layout(params(*shapes, tied=(tied,)), rules)
    alignment = math.lcm(
        rules.num_shards, BUCKET_ALIGNMENT, 65536 if rules.pad_for_high_busbw else 1
    )
    stop = 0
    for bucket in layout.buckets:
        assert bucket.start == stop
        assert bucket.stop % alignment == 0
        assert bucket.stop - bucket.params[-1].stop < alignment  # no more padding than needed
        assert bucket.shard_numel * rules.num_shards == bucket.numel
        stop = bucket.stop
    assert layout.numel == stop


@given(shapes, rules, st.integers(-1, 11))
def test_params_are_in_reverse_order_aligned_and_disjoint(shapes, rules, tied):
    given_params = params(*shapes, tied=(tied,))
    layout = plan_layout(given_params, rules)
    ranges = [entry for bucket in layout.buckets for entry in bucket.params]
    assert [entry.name for entry in ranges] == [param.spec.name for param in reversed(given_params)]
    assert all(entry.start % PARAM_ALIGNMENT == 0 for entry in ranges)
    assert all(
        entry.stop - entry.start == p.box.numel
        for entry, p in zip(ranges, reversed(given_params), strict=True)
    )
    assert all(before.stop <= after.start for before, after in pairwise(ranges))


@given(shapes, rules)
def test_a_bucket_closes_as_soon_as_it_holds_the_bucket_size(shapes, rules):
    layout = plan_layout(params(*shapes), rules)
    for bucket in layout.buckets[:-1]:
        assert bucket.params[-1].stop - bucket.start >= rules.closing_size
    for bucket in layout.buckets:
        before_last = bucket.params[-2].stop - bucket.start if len(bucket.params) > 1 else 0
        assert before_last < rules.closing_size


@given(shapes, rules)
def test_the_shard_ranges_of_all_ranks_tile_every_parameter_exactly_once(shapes, rules):
    given_params = params(*shapes)
    covered = {param.spec.name: [] for param in given_params}
    for bucket in plan_layout(given_params, rules).buckets:
        for rank in range(rules.num_shards):
            for part in bucket.update_ranges(rank):
                assert part.start >= 0 and part.start + part.numel <= bucket.shard_numel
                covered[part.name].append((part.param_start, part.param_start + part.numel))
    for param in given_params:
        stop = 0
        # rank by rank, so in the order of the parameter
        for start, end in covered[param.spec.name]:
            assert start == stop < end
            stop = end
        assert stop == param.box.numel


@given(shapes, st.integers(1, 8), st.sampled_from([1, 2, 4]), st.integers(1, 5000), st.booleans())
def test_every_element_is_updated_by_one_rank_of_each_instance(
    shapes, d, instances, bucket_size, is_outer_sharded
):
    """Where state is sharded across instances: by one rank of all instances."""
    given_params = params(*shapes)
    num_outer = instances if is_outer_sharded else 1
    layout = plan_layout(given_params, LayoutRules(d, num_outer, bucket_size))
    counts = {
        param.spec.name: np.zeros((instances, param.box.numel), dtype=int) for param in given_params
    }
    for instance, rank, bucket in product(range(instances), range(d), layout.buckets):
        stop = 0
        for part in bucket.update_ranges(rank, outer_index=instance % num_outer):
            assert stop <= part.start and part.start + part.numel <= bucket.update_numel
            counts[part.name][instance, part.param_start : part.param_start + part.numel] += 1
            stop = part.start + part.numel
    for count in counts.values():
        assert (count.sum(0) == 1).all() if is_outer_sharded else (count == 1).all()


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=14),
    st.integers(1, 4),
    st.integers(1, 3000),
    st.booleans(),
)
def test_successive_units_are_gathered_into_blocks_that_do_not_overlap(
    sizes, num_blocks, bucket_size, is_tied
):
    given_params = [
        replace(local, spec=replace(local.spec, unit=f"unit {index // 2}"))
        for index, local in enumerate(
            params(*((40 * size + 1,) for size in sizes), tied=(0,) if is_tied else ())
        )
    ]
    layout = plan_layout(
        given_params, LayoutRules(num_shards=3, bucket_size=bucket_size, gathers_by_unit=True)
    )
    blocks = layout.gather_blocks(num_blocks)
    placed = [
        (min(bucket.units), block, start, start + bucket.numel)
        for bucket, (block, start) in zip(layout.buckets, blocks.buckets, strict=True)
    ]
    assert all(0 <= start < stop <= blocks.numel[block] for _, block, start, stop in placed)
    assert all(
        any(stop == numel for _, block, _, stop in placed if block == key)
        for key, numel in blocks.numel.items()
    )
    units = [f"unit {number}" for number in range((len(sizes) + 1) // 2)]
    for first in range(len(units)):
        together = [entry for entry in placed if entry[0] in units[first : first + num_blocks]]
        for (_, block, start, stop), (_, other_block, other_start, other_stop) in combinations(
            together, 2
        ):
            assert block != other_block or stop <= other_start or other_stop <= start, together
