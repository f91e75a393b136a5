"""Routes of matrices: every matrix arrives in full at one rank and returns in pieces; the sent elements are counted."""

import math

import torch

from nanotrain.comm.group import Group
from nanotrain.optim.matrices import Coordinate, assign, list_matrices, place
from nanotrain.optim.whole_matrices import GridGroups, WholeMatrices
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.spec.params import Normal, ParamSpec, Shard, localize
from tests.harness import ranks


def spec(name: str, *shape: int, dim: int | None) -> ParamSpec:
    shards = () if dim is None else (Shard(dim, "tp"),)
    return ParamSpec(
        name, shape, dtype="fp32", init=Normal(1.0), weight_decay=True, needs_whole_matrix=True, shards=shards
    )


SPECS = [spec("a", 14, 9, dim=0), spec("b", 11, 26, dim=1), spec("c", 5, 7, dim=None), spec("d", 6, 8, dim=0)]


def full_matrix(number: int) -> torch.Tensor:
    shape = SPECS[::-1][number].shape  # buffers are in reverse order
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1000 * number


@ranks(8, tp=2, instances=2, strategy="optim")
def test_every_matrix_is_transformed_once_in_full_and_all_pieces_return(ctx):
    groups = GridGroups(ctx.group("dp_replicate"), ctx.group("dp_shard"), ctx.group("tp"))
    assert groups.sizes == Coordinate(2, 2, 2)
    placed = transform_all(ctx, groups, LayoutRules(num_shards=2, bucket_size=150))
    assert all([piece.shard for piece in each.pieces] in ([0], [1], [0, 1]) for each in placed)


@ranks(8, tp=2, instances=2, strategy="optim")
def test_pieces_of_state_that_is_sharded_across_instances_are_not_in_the_order_of_their_ranks(ctx):
    groups = GridGroups(Group.single_rank("dp_replicate", ctx.rank), ctx.group("dp_cp"), ctx.group("tp"))
    assert groups.sizes == Coordinate(1, 4, 2)
    placed = transform_all(ctx, groups, LayoutRules(num_shards=2, num_outer_shards=2, bucket_size=150))
    assert [2, 1] in [[piece.shard for piece in each.pieces] for each in placed]


def transform_all(ctx, groups, rules):
    coords, sizes = {"tp": groups.tensor.index, "ep": 0, "etp": 0}, {"tp": 2, "ep": 1, "etp": 1}
    params = [localize(spec, coords=coords, sizes=sizes) for spec in SPECS]
    layout = plan_layout(params, rules)
    assert len(layout.buckets) == 2
    owners = assign([1] * len(list_matrices([layout], splits_tensors=True)), groups.sizes)
    placed = place([layout], owners=owners, splits_tensors=True)
    whole, seen = WholeMatrices(placed, groups), []

    def local(number):
        return full_matrix(number)[params[::-1][number].box.slices()].flatten()

    def elements(number):
        pieces = [piece.shard for piece in placed[number].pieces]
        index = pieces.index(groups.shard.index) if groups.shard.index in pieces else None
        if index is None:
            return slice(0)
        begin = sum(piece.numel for piece in placed[number].pieces[:index])
        return slice(begin, begin + placed[number].pieces[index].numel)

    def transform(full, number):
        assert torch.equal(full, full_matrix(number))
        seen.append(number)
        return -full

    ctx.traffic.reset()
    results = whole.run(lambda n: local(n)[elements(n)], like=torch.zeros(0), transform=transform)
    assert seen == [number for number, each in enumerate(placed) if each.owner == groups.rank]
    assert {number for number, _ in results} == {n for n in range(4) if placed[n].piece_of(groups.shard.index)}
    for number, values in results:
        assert torch.equal(values, -local(number)[elements(number)])
    for axis, numel in whole.sent_numel().items():
        assert ctx.traffic.bytes(getattr(groups, axis).name, "all_to_all") == 4 * numel
    return placed
