"""The hooks of a run and their order, and what the first rank writes about a run."""

import json

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.train.open_run import choose_hooks, open_run
from nanotrain.train.plans.plan import plan_run
from nanotrain.train.start.inputs import open_inputs
from tests.train.small_run import arguments, metrics_of, train


def names_of(*more: str) -> list[str]:
    config = load(["+config=tiny", *more]).config
    return [type(hook).__name__ for hook in choose_hooks(config, None)]


def test_validation_comes_before_the_log_that_reports_it():
    names = names_of("--eval-interval", "5", "--generate-tokens", "3", "--profile")
    hooks = ["Evaluate", "Log", "Checkpoint", "Profile", "Sample", "Report", "Summary"]
    assert names == [f"{name}Hook" for name in hooks]


@pytest.mark.parametrize(
    ("flags", "hook"),
    [
        (("--eval-interval", "0"), "EvaluateHook"),
        (("--no-save",), "CheckpointHook"),
        (("--generate-tokens", "0"), "SampleHook"),
        (("--no-report",), "ReportHook"),
    ],
)
def test_a_hook_that_is_switched_off_is_left_out(flags, hook):
    assert hook in names_of() and hook not in names_of(*flags)


def test_a_run_writes_its_configuration_and_environment(tmp_path):
    config, inputs = open_inputs(load(arguments(tmp_path, "--train-iters", "1", "--generate-tokens", "0")))
    plan = plan_run(config, 1, rank=0)
    with open_run(plan, inputs, context=ParallelContext.attach(plan.topology)) as (run, hooks):
        train(run, *hooks)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["world_size"] == 1 and environment["origins"]["train.train_iters"] != "default"
    assert load([f"+config={tmp_path / 'config.yaml'}"]).config.train.train_iters == 1
    assert [line["step"] for line in metrics_of(tmp_path)] == [1]
