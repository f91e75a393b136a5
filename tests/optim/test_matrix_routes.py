"""`MatrixRoutes`: every matrix reaches its owner in full, and its pieces all ranks."""

import math
from dataclasses import replace

import torch

from nanotrain.comm.group import Group
from nanotrain.config.config import OptimConfig
from nanotrain.optim.matrices import Coordinate, assign_matrices
from nanotrain.optim.matrix_routes import GridGroups, MatrixRoutes, grid_groups
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.spec.params import Normal, ParamSpec, Shard, localize
from tests.harness import ranks
from tests.optim.test_muon import CONFIG
from tests.parallel.dp.toys import groups_of


@ranks(2, tp=2)
def test_in_blockwise_mode_the_grid_ends_at_a_tensor_parallel_rank(ctx):
    reduce = groups_of(ctx, "optim")
    groups = {"groups": ctx.groups, "shards_across": False}
    assert (
        grid_groups(reduce.shard, reduce.replicate, config=OptimConfig(), **groups).sizes.tensor
        == 2
    )
    config = replace(CONFIG, muon_tp_mode="blockwise")
    blockwise = grid_groups(reduce.shard, reduce.replicate, config=config, **groups)
    assert blockwise.sizes.tensor == 1 and blockwise.rank.tensor == 0


def spec(name: str, *shape: int, dim: int | None) -> ParamSpec:
    shards = () if dim is None else (Shard(dim, "tp"),)
    return ParamSpec(
        name,
        shape,
        dtype="fp32",
        init=Normal(1.0),
        weight_decay=True,
        needs_whole_matrix=True,
        shards=shards,
    )


SPECS = [
    spec("a", 14, 9, dim=0),
    spec("b", 11, 26, dim=1),
    spec("c", 5, 7, dim=None),
    spec("d", 6, 8, dim=0),
]


def full_matrix(number: int) -> torch.Tensor:
    shape = SPECS[::-1][number].shape  # buffers are in reverse order
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1000 * number


@ranks(8, tp=2, instances=2, strategy="optim")
def test_every_matrix_is_transformed_once_in_full_and_all_pieces_return(ctx):
    groups = GridGroups(ctx.group("dp_replicate"), ctx.group("dp_shard"), ctx.group("tp"))
    assert groups.sizes == Coordinate(2, 2, 2)
    placed = transform_all(ctx, groups, LayoutRules(num_shards=2, bucket_size=150))
    assert all(list(each.pieces) in ([0], [1], [0, 1]) for each in placed)


@ranks(8, tp=2, instances=2, strategy="optim")
def test_pieces_of_state_that_is_sharded_across_instances_are_not_in_the_order_of_their_ranks(ctx):
    groups = GridGroups(
        Group.single_rank("dp_replicate", ctx.rank), ctx.group("dp_cp"), ctx.group("tp")
    )
    assert groups.sizes == Coordinate(1, 4, 2)
    placed = transform_all(
        ctx, groups, LayoutRules(num_shards=2, num_outer_shards=2, bucket_size=150)
    )
    assert [2, 1] in [list(each.pieces) for each in placed]


def transform_all(ctx, groups, rules):
    coords, sizes = {"tp": groups.tensor.index, "ep": 0, "etp": 0}, {"tp": 2, "ep": 1, "etp": 1}
    params = [localize(spec, coords=coords, sizes=sizes) for spec in SPECS]
    layout = plan_layout(params, rules)
    assert len(layout.buckets) == 2
    placed = assign_matrices(
        [layout], sizes=groups.sizes, flops_of=lambda shape: 1, splits_tensors=True
    )
    whole, seen = MatrixRoutes(placed, groups), []

    def local(number):
        return full_matrix(number)[params[::-1][number].box.slices()].flatten()

    def elements(number):
        return placed[number].pieces[groups.shard.index].elements

    def transform(full, number):
        assert torch.equal(full, full_matrix(number))
        seen.append(number)
        return -full

    ctx.traffic.reset()
    results = whole.run(lambda n: local(n)[elements(n)], like=torch.zeros(0), transform=transform)
    assert seen == [number for number, each in enumerate(placed) if each.owner == groups.rank]
    assert {number for number, _ in results} == {
        n for n in range(4) if groups.shard.index in placed[n].pieces
    }
    for number, values in results:
        assert torch.equal(values, -local(number)[elements(number)])
    for axis, numel in whole.sent_numel().items():
        assert ctx.traffic.bytes(getattr(groups, axis).name, "all_to_all") == 4 * numel
    return placed
