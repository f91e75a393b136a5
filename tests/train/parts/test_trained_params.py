"""A resume that trains other parameters than the checkpoint."""

import re
from pathlib import Path

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.plan.plan import plan_run
from nanotrain.train.fit import fit
from nanotrain.train.inputs import open_inputs
from nanotrain.train.open_run import open_run
from nanotrain.train.parts.trained_params import TrainedParams
from tests.harness import run_ranks
from tests.laws.command_line import arguments, run_command_lines, saved_tensors

TWO_AND_TWO = "--train-iters 4 --micro-batch-size 6 --params-dtype bf16 --ema-decay 0.8"
ATTENTION = "--train-only layers.*.attention.*"


def resume_and_tell(ctx: ParallelContext, line: list[str]) -> str:
    """Run a command line on this rank; what it says of newly trained parameters."""
    config, inputs = open_inputs(load([*line, "--num-workers", "0"]))
    plan = plan_run(config, ctx.topology.world_size, rank=ctx.rank)
    with open_run(plan, inputs, context=ParallelContext.attach(plan.topology)) as (run, hooks):
        fit(run, hooks)
    part = run.parts.by_name["trained_params"]
    assert isinstance(part, TrainedParams)
    return part.changes


def test_a_resume_may_train_and_freeze_others(tmp_path: Path) -> None:
    how = f"{TWO_AND_TWO} --lr 1e-3 --min-lr 1e-3 --lr-warmup-iters 0 --weight-decay 0"
    first = arguments(tmp_path, how, ATTENTION, "--exit-interval 2")
    run_ranks(2, run_command_lines, first, strategy="optim_grads")
    before = saved_tensors(tmp_path)
    second = arguments(tmp_path, how, "--freeze layers.0.attention.*", "--exit-interval 1")
    (line,) = set(run_ranks(2, resume_and_tell, second, strategy="optim_grads_params"))
    assert re.fullmatch(
        r"(\d+) parameters of [\d,]+ elements newly trained, with optimizer state of zeros; "
        r"(\d+) parameters of [\d,]+ elements frozen from here on, without optimizer state",
        line,
    ), line
    after = saved_tensors(tmp_path)
    assert not any("layers.0.attention." in name for name in after if name.startswith("opt"))
    for name in before:
        if name.startswith("model/layers.0.attention."):
            assert torch.equal(after[name].bfloat16(), before[name].bfloat16()), name
    # the first update of Adam is lr * sign(gradient), whatever the number of the step
    name = "layers.1.mlp.down.weight"
    change = after[f"model/{name}"] - before[f"model/{name}"].float()
    assert change.abs().max() == pytest.approx(1e-3, rel=0.02)
    assert change.abs().median() == pytest.approx(1e-3, rel=0.05)
    moved = after[f"ema/{name}"] - before[f"model/{name}"].float()
    assert moved.abs().max() == pytest.approx(2e-4, rel=0.05)
