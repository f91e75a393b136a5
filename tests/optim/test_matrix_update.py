"""`MatrixUpdate` with state that is not stored in fp32, over several chunks, and in blockwise mode."""

from dataclasses import replace

import torch

from nanotrain.comm.collectives import barrier
from nanotrain.config.config import MuonTPMode, OptimConfig
from nanotrain.optim import part_state
from nanotrain.optim.matrix_update import grid_groups
from nanotrain.optim.stored import SCALE_BLOCK
from nanotrain.precision.policy import Precision
from tests.harness import ranks
from tests.optim.test_distributed import Trainee, grads_of
from tests.optim.test_muon import CONFIG
from tests.parallel.dp.toys import groups_of

SHAPES = ((70, 40), (13,), (50, 60))


def weights_after(ctx, precision: Precision | None) -> dict[str, torch.Tensor]:
    trainee = Trainee(ctx, "optim", config=CONFIG, shapes=SHAPES, precision=precision, bucket_size=10**6)
    for step in range(3):
        trainee.step(grads_of(ctx.rank, step, shapes=SHAPES))
    return trainee.weights()


@ranks(2, strategy="optim")
def test_a_momentum_in_bf16_and_chunks_change_values_by_rounding(ctx):
    exact = weights_after(ctx, None)
    barrier(ctx.control)
    part_state.CHUNK_NUMEL = SCALE_BLOCK  # of all ranks, which are threads of one process
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
    assert grid_groups(reduce.shard, reduce.replicate, config=OptimConfig(), **groups).sizes.tensor == 2
    config = replace(CONFIG, muon_tp_mode=MuonTPMode.blockwise)
    blockwise = grid_groups(reduce.shard, reduce.replicate, config=config, **groups)
    assert blockwise.sizes.tensor == 1 and blockwise.rank.tensor == 0
