"""`MatrixUpdate` with state that is not stored in fp32, over several chunks."""

import torch

from nanotrain.comm.collectives import barrier
from nanotrain.optim import state
from nanotrain.optim.stored import SCALE_BLOCK
from nanotrain.precision.dtypes import Precision
from tests.harness import ranks
from tests.optim.test_distributed import Trainee, grads_of
from tests.optim.test_muon import CONFIG

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
