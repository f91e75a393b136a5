"""`MatrixUpdate` with state that is not stored in fp32, over several chunks, and in blockwise mode."""

import math
from dataclasses import replace

import torch

from nanotrain.comm.collectives import barrier
from nanotrain.comm.group import Group
from nanotrain.config.config import OptimConfig
from nanotrain.optim import state
from nanotrain.optim.matrices import Coordinate, assign_matrices
from nanotrain.optim.matrix_update import GridGroups, MatrixRoutes, grid_groups
from nanotrain.optim.stored import SCALE_BLOCK
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.params import Normal, ParamSpec, Shard, localize
from tests.harness import ranks
from tests.optim.test_distributed import Trainee, grads_of
from tests.optim.test_muon import CONFIG
from tests.parallel.dp.toys import groups_of

SHAPES = ((70, 40), (13,), (50, 60))


def weights_after(ctx, precision: Precision | None) -> dict[str, torch.Tensor]:
    trainee = Trainee(
        ctx, "optim", config=CONFIG, shapes=SHAPES, precision=precision, bucket_size=10**6
    )
    for step in range(3):
        trainee.step(grads_of(ctx.rank, step, shapes=SHAPES))
    return trainee.weights()


@ranks(2, strategy="optim")
def test_a_momentum_in_bf16_and_chunks_change_values_by_rounding(ctx):
    exact = weights_after(ctx, None)
    barrier(ctx.control)
    state.CHUNK_NUMEL = SCALE_BLOCK  # of all ranks, which are threads of one process
    chunked = weights_after(ctx, None)
    rounded = weights_after(ctx, Precision(params=torch.float32, exp_avg=torch.bfloat16))
    for name, weight in exact.items():
        assert torch.equal(chunked[name], weight)
        distance = (rounded[name] - weight).norm() / (weight.norm() + 1e-12)
        assert 0 < distance < 1e-2


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
