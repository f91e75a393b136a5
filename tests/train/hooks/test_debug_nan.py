"""The first tensor that is not finite is named by module, rank and microbatch."""

import pytest
import torch

from nanotrain.errors import TrainingFault
from nanotrain.train.hooks.debug_nan import DebugNanHook, Finding
from nanotrain.train.hooks.hook import Hook
from tests.harness import ranks
from tests.train.small_run import Spy, small_run, train


class Poison(Hook):
    """Makes one module return a NaN in a step."""

    def __init__(self, name: str, *, step: int, in_backward: bool = False) -> None:
        self.name, self.step, self.in_backward = name, step, in_backward

    def before_training(self, run) -> None:
        def poison(module, inputs, output):
            if run.state.step + 1 != self.step or run.context.heartbeat.read().action[-1] != "1":
                return output
            if self.in_backward:
                output.register_hook(lambda grad: grad * torch.nan)
                return output
            return output * torch.nan

        (stage,) = run.stages.values()
        dict(stage.named_modules())[self.name].register_forward_hook(poison)


FLAGS = ("--train-iters", "9", "--num-layers", "2", "--max-consecutive-skips", "3")


@pytest.mark.parametrize(
    ("in_backward", "what"), [(False, "the output of layers.1.mlp"), (True, "the gradient of the output of layers.1.")]
)
def test_the_module_and_microbatch_are_named(tmp_path, in_backward, what):
    spy = Spy()
    with small_run(tmp_path, *FLAGS, "--global-batch-size", "2") as run, pytest.raises(TrainingFault) as error:
        train(run, Poison("layers.1.mlp", step=3, in_backward=in_backward), DebugNanHook(), spy)
    assert f"the first tensor of step 3 that is not finite is {what}" in str(error.value)
    assert "on rank 0, microbatch 1, action" in error.value.why
    assert spy.reports[-1].step == 3 and spy.reports[-1].skipped


def test_parameters_that_are_released_after_each_unit_are_checked_while_they_are_there(tmp_path):
    sharded = ("--data-parallel-sharding-strategy", "optim_grads_params")
    hook, poisoned = DebugNanHook(), []

    class PoisonWeight(Hook):
        def before_training(self, run) -> None:
            (stage,) = run.stages.values()
            stage.final_norm.register_forward_pre_hook(lambda module, _: self.poison(module, run))

        def poison(self, module, run) -> None:
            if run.state.step == 1:
                poisoned.append(module.weight.detach().fill_(torch.nan))

    with small_run(tmp_path, *FLAGS, *sharded) as run, pytest.raises(TrainingFault) as error:
        train(run, PoisonWeight(), hook)
    assert poisoned and "the first tensor of step 2 that is not finite is parameter final_norm.weight" in str(
        error.value
    )
    assert not run.stages[0].final_norm.weight.untyped_storage().nbytes(), "else it is never released"


def test_weights_that_are_gathered_in_fp8_are_no_finding(tmp_path):
    fp8 = (
        "--bf16",
        "--fp8-format",
        "e4m3",
        "--fp8-recipe",
        "tensorwise",
        "--fp8-param-gather",
        "--data-parallel-sharding-strategy",
        "optim",
    )
    hook, found = DebugNanHook(), []

    class Look(Hook):
        def after_step(self, run, report) -> None:
            found.append(hook._finding)

    with small_run(tmp_path, *FLAGS[2:], *fp8, "--train-iters", "2", "--global-batch-size", "2") as run:
        assert any(layer.fp8_weights is not None for layer in run.data_parallel)
        train(run, Look(), hook)
    assert found == [None, None]


@ranks(2)
def test_one_ranks_finding_is_the_error_of_all(ctx, tmp_path):
    hooks = [Poison("layers.0.attention", step=2)] if ctx.rank == 1 else []
    with small_run(tmp_path, *FLAGS, "--global-batch-size", "4", context=ctx) as run:
        with pytest.raises(TrainingFault, match=r"output of layers.0.attention.*: on rank 1 \(dp1\), microbatch 1"):
            train(run, *hooks, DebugNanHook())
        assert run.state.step == 2


def test_findings_are_ordered_by_cause():
    findings = [Finding("", 0, "", action) for action in ("B0.0", "B1.0", "F1.0", "F0.0", "F0.1")]
    assert [each.action for each in sorted(findings, key=lambda each: each.order)] == [
        "F0.0",
        "F1.0",
        "B1.0",
        "B0.0",
        "F0.1",
    ]
