"""`--exp-avg-dtype`, `--exp-avg-sq-dtype`, `--main-params-dtype`: the error of each, its bytes, its
resume.

`python -m tests.optim.test_moment_dtypes` prints the table of docs/optimizers.md.
"""

import math
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from torch import Tensor

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import OptimConfig
from nanotrain.optim.elementwise import ADAM
from nanotrain.optim.rule import UpdateStep
from nanotrain.optim.state import PartState, ShardPart
from nanotrain.optim.stored import SCALE_BLOCK, StoredTensor
from nanotrain.parallel.dp.layout import FlatRange
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.params import LocalParam, Normal, ParamSpec
from tests.harness import ranks, run_ranks
from tests.optim.test_distributed import CONFIG, Trainee, grads_of
from tests.parallel.dp.toys import RESIDENT_STRATEGIES

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NUMEL, STEPS, LR = 4 * SCALE_BLOCK, 40, 1e-3
# main params, exp_avg, exp_avg_sq -> largest error of the change of the weights in `STEPS` steps,
# relative
ERRORS = {
    (FP32, BF16, FP32): 4e-3,
    (FP32, FP16, FP32): 5e-4,
    (FP32, FP32, BF16): 2.5e-3,
    (FP32, FP32, FP16): 4e-4,
    (FP32, BF16, BF16): 4.5e-3,
    (FP32, FP16, FP16): 6e-4,
    (FP16, FP32, FP32): 4e-3,
    (BF16, FP32, FP32): 4e-2,
}


def change_of_weights(
    main: torch.dtype, exp_avg: torch.dtype, exp_avg_sq: torch.dtype, *, steps: int
) -> Tensor:
    """The change of weights near 0.02 by AdamW; gradients have a mean, noise, and magnitudes from
    1e-6 to 1e-2.
    """
    draw = torch.Generator().manual_seed(0)
    start = 0.02 * torch.randn(NUMEL, generator=draw)
    size = 10 ** (-6 + 4 * torch.rand(NUMEL, generator=draw))
    direction = torch.randn(NUMEL, generator=draw)
    spec = ParamSpec("a", (NUMEL,), dtype="fp32", init=Normal(1.0), weight_decay=True)
    stored = {
        "main": StoredTensor.zeros(NUMEL, main, device=start.device),
        "exp_avg": StoredTensor.zeros(NUMEL, exp_avg, device=start.device),
        "exp_avg_sq": StoredTensor.zeros(NUMEL, exp_avg_sq, device=start.device, is_square=True),
    }
    stored["main"].write(start)
    state = PartState(
        ShardPart(0, NUMEL, (FlatRange(LocalParam.unsharded(spec), 0, 0, NUMEL),)),
        main=stored.pop("main"),
        state=stored,
        grad=torch.zeros(NUMEL),
        model_params=torch.zeros(NUMEL, dtype=BF16),
    )
    config = OptimConfig(weight_decay=0.0)
    for number in range(1, steps + 1):
        state.grad.copy_(size * (direction + 2 * torch.randn(NUMEL, generator=draw)))
        with state.loaded(0, NUMEL) as ranges:
            ADAM.update(
                ranges,
                UpdateStep(
                    config,
                    torch.tensor(float(number)),
                    LR,
                    LR,
                    config.weight_decay,
                    found_inf=torch.tensor(0.0),
                ),
            )
    return state.main.read() - start


def error_of(dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], *, steps: int = STEPS) -> float:
    """The error of the change of the weights, relative to the change in fp32."""
    exact = change_of_weights(FP32, FP32, FP32, steps=steps)
    return float((change_of_weights(*dtypes, steps=steps) - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtypes", ERRORS, ids=lambda dtypes: " ".join(str(d)[6:] for d in dtypes))
def test_the_error_of_a_dtype_is_that_of_its_rounding(dtypes):
    assert 0 < error_of(dtypes) < ERRORS[dtypes]


def test_plain_fp16_without_scales_would_lose_second_moments():
    # The error that scales prevent: squares of gradients of 1e-6 are 0 in fp16.
    assert torch.tensor(1e-6).square().half() == 0
    stored = StoredTensor.zeros(SCALE_BLOCK, FP16, device=torch.device("cpu"), is_square=True)
    stored.write(torch.full((SCALE_BLOCK,), 1e-12))
    assert math.isclose(stored.read()[0], 1e-12, rel_tol=2**-11)


def train_sharded(ctx: ParallelContext, precision: Precision) -> dict[str, dict[str, Tensor]]:
    weights = {}
    for strategy in RESIDENT_STRATEGIES:
        trainee = Trainee(ctx, strategy, dtype=precision.params, precision=precision)
        for step in range(3):
            trainee.step(grads_of(ctx.rank, step))
        weights[strategy] = trainee.weights()
        allocated = sum(tensor.nbytes for tensor in trainee.optimizer.allocated_tensors)
        sizes = [precision.main.itemsize * precision.has_separate_main_params]
        sizes += [precision.exp_avg.itemsize, precision.exp_avg_sq.itemsize]
        for state in trainee.optimizer._states:
            num_scales = 4 * sum(
                dtype is FP16 for dtype in (precision.exp_avg, precision.exp_avg_sq)
            )
            main_is_view = not precision.has_separate_main_params
            numel = state.bucket.layout.update_numel
            allocated -= numel * (sum(sizes) + main_is_view * precision.main.itemsize) + num_scales
        assert allocated == 0
    return weights


@pytest.mark.parametrize(
    "precision",
    [
        Precision(BF16, exp_avg=BF16, exp_avg_sq=FP16),
        Precision(BF16, main=BF16, exp_avg=BF16, exp_avg_sq=BF16),
        Precision(FP32, exp_avg=FP16, exp_avg_sq=FP16),
    ],
    ids=str,
)
def test_every_strategy_trains_alike_and_allocates_what_is_planned(precision):
    weights_of = run_ranks(2, train_sharded, precision, strategy="optim", shares=True)[0]
    exact = run_ranks(2, train_sharded, Precision(precision.params), strategy="optim", shares=True)[
        0
    ]
    for strategy, weights in weights_of.items():
        for name, weight in weights.items():
            # scales are per block of a shard, so shards of another size round moments otherwise
            torch.testing.assert_close(weight, weights_of["no_shard"][name], rtol=2**-7, atol=2e-3)
            torch.testing.assert_close(weight, exact[strategy][name], rtol=2**-6, atol=2e-2)


@ranks(2, strategy="optim", shares=True)
def test_a_checkpoint_of_one_dtype_loads_in_another_and_resumes_to_the_bit_in_its_own(ctx):
    folder, _ = all_gather_object(mkdtemp(prefix="nanotrain-moments-"), ctx.control)
    low = Precision(BF16, main=FP16, exp_avg=FP16, exp_avg_sq=BF16)
    trainee = Trainee(ctx, "optim", dtype=BF16, precision=low)
    for step in range(2):
        trainee.step(grads_of(ctx.rank, step))
    checkpointer = Checkpointer(Path(folder), group=ctx.control)
    objects = {"optimizer": trainee.optimizer.state_dict()}
    path = checkpointer.save(
        2, trainee.optimizer.tensors_to_save(), objects=objects, config={}, topology={}
    )
    trainee.step(grads_of(ctx.rank, 2))
    for precision in (
        low,
        Precision(BF16),
        Precision(BF16, main=BF16, exp_avg=BF16, exp_avg_sq=FP16),
    ):
        resumed = Trainee(ctx, "optim", dtype=BF16, precision=precision)
        checkpointer.restore(path, resumed.optimizer.state_tensors())
        resumed.optimizer.load_state_dict(objects["optimizer"])
        resumed.parallel.start_param_gather()
        resumed.step(grads_of(ctx.rank, 2))
        for name, weight in trainee.weights().items():
            if precision is low:
                assert torch.equal(resumed.weights()[name], weight)
            torch.testing.assert_close(
                resumed.weights()[name], weight, rtol=2**-7, atol=2 * CONFIG.lr
            )


if __name__ == "__main__":
    for row in ERRORS:
        names = " | ".join(str(dtype)[6:] for dtype in row)
        print(f"| {names} | {error_of(row):.1e} | {error_of(row, steps=400):.1e} |")
