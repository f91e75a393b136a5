"""Matrices of parameters, their owners and their pieces in shards."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nanotrain.optim.matrices import (
    Coordinate,
    OwnedMatrix,
    assign_matrices,
    assign_owners,
    describe_balance,
    matrices_of,
)
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.spec.params import LocalParam, Normal, ParamSpec, Shard, localize

SPEC = ParamSpec(
    "up", (8, 6), dtype="fp32", init=Normal(1.0), weight_decay=True, needs_whole_matrix=True
)
COLUMN, ROW = (
    replace(SPEC, shards=(Shard(0, "tp"),)),
    replace(SPEC, name="down", shards=(Shard(1, "tp"),)),
)
EXPERTS = replace(
    SPEC, name="experts", shape=(4, 8, 6), shards=(Shard(0, "ep"), Shard(1, "etp")), is_expert=True
)
SIZES = {"tp": 2, "ep": 2, "etp": 2}


def owned(owner: Coordinate, flops: int) -> OwnedMatrix:
    return OwnedMatrix(matrices_of(local(SPEC), splits_tensors=True)[0], 0, {}, owner, flops)


def local(spec: ParamSpec) -> LocalParam:
    return localize(spec, coords={"tp": 1, "ep": 1, "etp": 0}, sizes=SIZES)


def test_a_sharded_matrix_has_its_full_shape_and_a_replicated_one_no_dim():
    column, row, replicated = (
        matrices_of(local(s), splits_tensors=True)[0] for s in (COLUMN, ROW, SPEC)
    )
    assert (column.local_shape, column.sharded_dim, column.shape) == ((4, 6), 0, (8, 6))
    assert (row.local_shape, row.sharded_dim, row.shape) == ((8, 3), 1, (8, 6))
    assert (replicated.local_shape, replicated.sharded_dim, replicated.shape) == (
        (8, 6),
        None,
        (8, 6),
    )


def test_every_local_expert_is_a_matrix_over_expert_tensor_parallel_ranks():
    experts = matrices_of(local(EXPERTS), splits_tensors=True)
    assert [(m.index, m.local_shape, m.sharded_dim, m.shape) for m in experts] == [
        (0, (4, 6), 0, (8, 6)),
        (1, (4, 6), 0, (8, 6)),
    ]


def test_in_blockwise_mode_a_block_is_a_matrix():
    (block,) = matrices_of(local(ROW), splits_tensors=False)
    assert (block.local_shape, block.sharded_dim, block.shape) == ((8, 3), None, (8, 3))


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 2)),
)
def test_no_rank_has_more_than_the_mean_and_one_matrix(flops, sizes):
    grid = Coordinate(*sizes)
    owners = assign_owners(flops, grid)
    num_ranks = grid.replicate * grid.shard * grid.tensor
    work = dict.fromkeys(owners, 0)
    for owner, cost in zip(owners, flops, strict=True):
        work[owner] += cost
    assert max(work.values()) <= sum(flops) / num_ranks + max(flops)
    report = describe_balance(
        [owned(owner, cost) for owner, cost in zip(owners, flops, strict=True)], grid
    )
    assert report.endswith(f" {max(work.values()) * num_ranks / sum(flops):.2f} times the mean")
    fewest = 0 if len(flops) < num_ranks else min(owners.count(owner) for owner in work)
    assert report.startswith(f"{len(flops)} matrices over ") and f", {fewest} to " in report


def test_equal_matrices_are_divided_evenly():
    sizes = Coordinate(2, 2, 2)
    report = describe_balance([owned(owner, 7) for owner in assign_owners([7] * 16, sizes)], sizes)
    assert (
        report
        == "16 matrices over 8 ranks, 2 to 2 per rank, FLOPs of the busiest rank 1.00 times the mean"
    )


@given(st.integers(1, 5), st.integers(1, 400))
def test_pieces_are_the_param_ranges_of_the_shards(num_shards, bucket_size):
    params = [
        local(spec)
        for spec in (COLUMN, replace(SPEC, name="norm", needs_whole_matrix=False), EXPERTS, ROW)
    ]
    layout = plan_layout(params, LayoutRules(num_shards=num_shards, bucket_size=bucket_size))
    sizes = Coordinate(1, num_shards, 2)
    everything = assign_matrices(
        [layout, layout], sizes=sizes, flops_of=lambda shape: 1, splits_tensors=True
    )
    assert len(everything) == 2 * (1 + 2 + 1)
    assert {each.bucket for each in everything} <= set(range(2 * len(layout.buckets)))
    for each in everything:
        bucket = layout.buckets[each.bucket % len(layout.buckets)]
        assert sum(piece.numel for piece in each.pieces.values()) == each.matrix.local_numel
        begin = each.matrix.index * each.matrix.local_numel
        for shard, piece in each.pieces.items():
            (part,) = [
                p for p in bucket.update_ranges(shard) if p.name == each.matrix.param.spec.name
            ]
            assert part.param_start - part.start + piece.start == begin
            assert part.start <= piece.start and piece.start + piece.numel <= part.elements.stop
            begin += piece.numel
