"""The norm of the parameters and the zeros in gradients are those by hand, on one rank and on several."""

import json
from pathlib import Path

import pytest
import torch

from nanotrain.train.hooks.norms import NormsHook
from tests.harness import run_ranks
from tests.laws.command_line import arguments, run_command_lines
from tests.train.small_run import Spy, small_run, train

LOGGED = "--log-params-norm --log-num-zeros-in-grad --log-max-attention-logit"


def test_both_are_those_by_hand(tmp_path: Path) -> None:
    spy = Spy()
    with small_run(tmp_path, "--train-iters", "1", *LOGGED.split()) as run:
        train(run, NormsHook(), spy)
        params = [param for stage in run.stages.values() for param in stage.parameters()]
        grads = [grad for state in run.optimizer._states for grad in [state.grads]]
        gaps = sum(grad.numel() for grad in grads) - sum(param.numel() for param in params)
        zeros = sum(int((grad == 0).sum()) for grad in grads)
    assert gaps > 0 and spy.reports[0].num_zeros_in_grad == zeros - gaps > 0
    norm = torch.cat([param.detach().double().flatten() for param in params]).norm().item()
    assert spy.reports[0].params_norm == pytest.approx(norm, rel=1e-6)


def test_layouts_agree(tmp_path: Path) -> None:
    steps, tp = (
        "--train-iters 2 --micro-batch-size 2 --log-interval 1",
        "--tensor-model-parallel-size 2 --sequence-parallel",
    )
    tp += " --data-parallel-sharding-strategy optim_grads"
    run_ranks(1, run_command_lines, arguments(tmp_path / "one", steps, LOGGED))
    run_ranks(4, run_command_lines, arguments(tmp_path / "four", steps, LOGGED, tp), tp=2, strategy="optim_grads")
    one, four = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "four")
    )
    for row, expected in zip(four, one, strict=True):
        assert row["params_norm"] == pytest.approx(expected["params_norm"], rel=1e-6)
        assert row["num_zeros_in_grad"] == expected["num_zeros_in_grad"] > 0
        assert row["max_attention_logit"] == pytest.approx(expected["max_attention_logit"], rel=1e-4)
    assert one[0]["max_attention_logit"] != one[1]["max_attention_logit"], "each logged step starts anew"
