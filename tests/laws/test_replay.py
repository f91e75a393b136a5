"""`--replay-interval`: planted flips are found with their rank, sound runs are left alone, and a run
with replays equals one without, to the bit.
"""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.errors import CorruptState
from nanotrain.parallel.dp.bucket import Bucket
from nanotrain.plan.plan import plan_run
from nanotrain.runs.failures import RankFailure
from nanotrain.runs.verdict import Evidence, judge
from nanotrain.topology.partners import Host
from nanotrain.train.fit import fit
from nanotrain.train.hooks import replay
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.inputs import open_inputs
from nanotrain.train.open_run import open_run
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport
from tests.harness import run_ranks
from tests.laws.command_line import (
    VOCAB_SIZE,
    arguments,
    assert_same_to_the_bit,
    run_command_lines,
    steps_of,
)
from tests.test_two_hosts import DRILLS

EVERY_TWO = "--micro-batch-size 2 --replay-interval 2 --train-iters 4 --no-save"
FP8 = "--params-dtype bf16 --fp8-format hybrid --hidden-size 32 --ffn-hidden-size 64"
LAYOUTS = {
    "dp 3": (3, "--data-parallel-sharding-strategy optim --overlap-grad-reduce"),
    "ZeRO-2": (2, "--data-parallel-sharding-strategy optim_grads"),
    "ZeRO-3": (2, "--data-parallel-sharding-strategy optim_grads_params"),
    "tp 2": (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp 2": (4, "--pipeline-model-parallel-size 2"),
    "cp 2": (4, "--context-parallel-size 2"),
    "experts": (
        4,
        "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
        "--moe-aux-loss-coeff 0.01",
    ),
    "bf16": (2, "--params-dtype bf16 --data-parallel-sharding-strategy optim_grads"),
    "fp8 with histories": (2, f"{FP8} --fp8-recipe delayed"),
    "fp8 without": (2, f"{FP8} --fp8-recipe tensorwise"),
    "interleaved": (
        4,
        "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-schedule interleaved "
        "--num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 3",
    ),
    "one microbatch": (2, "--micro-batch-size 6"),
}
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(("num_ranks", "how"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_with_replays_equals_one_without_and_is_sound(
    tmp_path: Path, num_ranks: int, how: str
) -> None:
    lines = []
    for name, more in (("plain", "--replay-interval 0"), ("replayed", "--replay-interval 1")):
        how_long = "--train-iters 3 --micro-batch-size 2"
        lines.append(arguments(tmp_path / name, how_long, how, more))

    run_ranks(num_ranks, run_command_lines, *lines)

    assert_same_to_the_bit(tmp_path / "replayed", tmp_path / "plain")


@pytest.mark.more_layouts
def test_a_compiled_run_with_replays_is_one_without_within_rounding(tmp_path: Path) -> None:
    """A replay changes which graphs are compiled, and so the order of their sums."""
    runs = {tmp_path / "plain": "--replay-interval 0", tmp_path / "replayed": "--replay-interval 1"}
    how = "--train-iters 3 --micro-batch-size 2 --torch-compile"

    run_ranks(2, run_command_lines, *(arguments(run, how, more) for run, more in runs.items()))

    for name in ("loss", "grad_norm"):
        plain, replayed = ([step[name] for step in steps_of(run)] for run in runs)
        assert replayed == pytest.approx(plain, rel=1e-6)


class Flip(Hook):
    """Flips a bit of a weight, or of the optimizer's state, of one rank after a step."""

    def __init__(self, rank: int, step: int, seed: int, *, of_state: bool) -> None:
        self._rank, self._step, self._draw = rank, step, random.Random(seed)
        self._of_state = of_state

    def after_step(self, run: Run, report: StepReport) -> None:
        if report.step != self._step:
            return
        run.wait_for_params()
        tensors = weights_of(run)
        if self._of_state:
            state = run.optimizer.state_tensors().items()
            tensors = [tensor for box, tensor in state if box.name.startswith("optimizer/")]
        if run.context.rank == self._rank:
            flip(self._draw, [tensor for tensor in tensors if tensor.any()])


def weights_of(run: Run) -> list[Tensor]:
    """The weights of a rank, without the padding of the vocabulary: no result depends on it."""
    weights = []
    for stage in run.stages.values():
        for name, weight in stage.named_parameters():
            num_rows = VOCAB_SIZE if name == "embedding.word.weight" else len(weight)
            weights.append(weight.detach()[:num_rows])
    return weights


def flip(draw: random.Random, tensors: Sequence[Tensor]) -> None:
    """Flip a high bit of the mantissa or the sign of a value that is not zero."""
    tensor = draw.choice(tensors)
    values = tensor.detach().view(-1)
    nonzero = values.nonzero().flatten().tolist()
    index = draw.choice(nonzero)
    bits = values.view(torch.int32)
    bits[index] ^= 1 << draw.choice([20, 21, 22, 31])


def flip_grads(run: Run, step: int, seed: int) -> None:
    """Plant a flip in a gradient of the first microbatch, before it is reduced."""
    draw = random.Random(seed)
    buckets = [bucket for dp in run.data_parallel for bucket in getattr(dp, "buckets", ())]
    bucket = draw.choice([bucket for bucket in buckets if isinstance(bucket, Bucket)])
    observe = bucket.observe

    def flipped() -> None:
        if run.state.step + 1 == step and bucket.observer is not None:
            part = run.parts.by_name["replay"]
            if not part._is_replaying:  # type: ignore[attr-defined]
                flip(draw, [grad for grad in bucket.written_grads().values() if grad.any()])
        observe()

    bucket.observe = flipped  # type: ignore[method-assign]


def flip_products(run: Run, step: int, seed: int) -> None:
    """One linear layer of this rank returns a wrong element from a step on, as a broken chip does."""
    draw = random.Random(seed)
    stage = draw.choice(list(run.stages.values()))
    layers = [module for name, module in stage.named_modules() if name.endswith("mlp")]
    layer = draw.choice(layers)

    def wrong(module: Any, inputs: Any, output: Any) -> Any:
        if run.state.step + 1 < step:
            return output
        first = output[0] if isinstance(output, tuple) else output
        change = torch.zeros_like(first)
        change.view(-1)[draw.randrange(change.numel())] = 0.5
        return (first + change, *output[1:]) if isinstance(output, tuple) else first + change

    layer.register_forward_hook(wrong)


class PlantBefore(Hook):
    """Plants a fault on one rank before training."""

    def __init__(self, plant: Callable[[Run, int, int], None], rank: int, step: int, seed: int):
        self._plant, self._rank, self._step, self._seed = plant, rank, step, seed

    def before_training(self, run: Run) -> None:
        if run.context.rank == self._rank:
            self._plant(run, self._step, self._seed)


def hook_of(kind: str, rank: int, seed: int) -> Hook:
    """A fault that the comparison of step 2 can see."""
    if kind in ("weights", "moments"):
        return Flip(rank, 1, seed, of_state=kind == "moments")
    plant = {"gradients": flip_grads, "products": flip_products}[kind]
    return PlantBefore(plant, rank, 2, seed)


def train_faultily(ctx: ParallelContext, line: Sequence[str], kind: str, seed: int) -> str:
    """Train with a planted fault; returns the error."""
    replay.gather_hosts = lambda control: tuple(Host(f"host-{r}") for r in range(control.size))
    draw = random.Random(seed)
    rank = draw.randrange(ctx.topology.world_size)
    config, inputs = open_inputs(load(line))
    plan = plan_run(config, ctx.topology.world_size, rank=ctx.rank)
    context = ParallelContext.attach(plan.topology)
    try:
        with open_run(plan, inputs, context=context) as (run, hooks):
            fit(run, [*hooks, hook_of(kind, rank, seed)])
    except CorruptState as error:
        evidence = Evidence(exit_codes={0: 2}, failures=[RankFailure.of(error, rank=ctx.rank)])
        return f"{rank}|{run.state.step + 1}|{error}|{judge(evidence).line}"
    return "nothing was found"


NUM_FLIPS = 50 if os.environ.get(DRILLS) else 1


@pytest.mark.parametrize("kind", ["weights", "gradients", "products"])
@pytest.mark.parametrize("seed", range(NUM_FLIPS))
def test_a_planted_flip_is_found_with_its_rank(tmp_path: Path, kind: str, seed: int) -> None:
    line = arguments(tmp_path / "run", EVERY_TWO, LAYOUTS["dp 3"][1])

    for reply in run_ranks(3, train_faultily, line, kind, seed):
        rank, step, error, verdict = reply.split("|")
        assert step == "2"
        # a weight that is a main parameter too is found by its checksum
        found_by = f"rank {rank} (host host-{rank}) computed step 2 wrong"
        if kind == "weights" and "holds other optimizer state" in error:
            found_by = f"rank {rank} (host host-{rank}) holds other optimizer state"
        assert found_by in error and f"exclude host host-{rank}" in error
        assert verdict.startswith(f"exclude host-{rank}: ")


@pytest.mark.parametrize("seed", range(NUM_FLIPS))
def test_a_flip_in_the_moments_between_two_steps_is_found(tmp_path: Path, seed: int) -> None:
    line = arguments(tmp_path / "run", EVERY_TWO, LAYOUTS["dp 3"][1])

    for reply in run_ranks(3, train_faultily, line, "moments", seed):
        rank, _, error, verdict = reply.split("|")
        assert verdict.startswith(f"exclude host-{rank}: ")
        assert (
            f"rank {rank} (host host-{rank}) holds other optimizer state than after step 1" in error
        )
        assert "optimizer/" in error and f"exclude host host-{rank}" in error


def test_two_replicas_tell_a_fault_that_does_not_come_again(tmp_path: Path) -> None:
    line = arguments(tmp_path / "run", EVERY_TWO)

    for reply in run_ranks(2, train_faultily, line, "gradients", 5):
        rank, _, error, _ = reply.split("|")
        assert f"rank {rank} (host host-{rank}) computed step 2 wrong" in error


def test_two_replicas_are_both_named_where_the_fault_comes_again(tmp_path: Path) -> None:
    line = arguments(tmp_path / "run", EVERY_TWO)

    for reply in run_ranks(2, train_faultily, line, "products", 5):
        assert "ranks 0-1 (hosts host-0, host-1) disagree on step 2" in reply
