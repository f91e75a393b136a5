"""`--auto-layout`: a searched layout on every rank, which the run folder keeps and the command line
limits.
"""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
import yaml

from nanotrain.comm.parallel_context import Launch, ParallelContext
from nanotrain.config.load import load
from nanotrain.config.schema import value_of
from nanotrain.errors import ConfigError
from nanotrain.plan.plan import plan_run
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.search import Search, search
from nanotrain.train import auto_layout
from nanotrain.train.auto_layout import (
    LAYOUT,
    SavedLayout,
    with_auto_layout,
    with_expert_overlap,
    with_planned_settings,
)
from nanotrain.train.checks import Start
from nanotrain.train.fit import fit
from nanotrain.train.inputs import open_inputs
from nanotrain.train.main import main
from nanotrain.train.open_run import open_run
from nanotrain.train.run import RunInputs
from tests.harness import run_ranks
from tests.train.small_run import arguments, metrics_of

FLAGS = ("--auto-layout", "--global-batch-size", "8", "--save-interval", "2")

pytestmark = pytest.mark.usefixtures("logging_as_before")


def choose(line: list[str], rank: int, world_size: int) -> Any:
    loaded = load(line)
    launch = Launch(rank, rank, world_size, local_world_size=world_size)
    config, inputs = open_inputs(loaded)
    return with_auto_layout(config, inputs, start=Start(config, launch), explicit=loaded.explicit)


def train_starts(ctx: ParallelContext, *lines: list[str]) -> list[tuple[str, str]]:
    """Train with command lines, one after the other; the layout of each, and the origin of the
    micro-batch size.
    """
    layouts = []
    for line in lines:
        config, inputs = choose(line, ctx.rank, ctx.topology.world_size)
        plan = plan_run(config, ctx.topology.world_size, rank=ctx.rank)
        with open_run(plan, inputs, context=ParallelContext.attach(plan.topology)) as (run, hooks):
            fit(run, hooks)
        layouts.append(
            (str(config.parallel) + str(config.train), inputs.origins["train.micro_batch_size"])
        )
    return layouts


def test_all_ranks_train_with_the_layout_and_a_resume_keeps_it_on_as_many_ranks(tmp_path, capfd):
    first = arguments(tmp_path, *FLAGS, "--train-iters", "2", "--micro-batch-size", "2")
    second, third = (arguments(tmp_path, *FLAGS, "--train-iters", number) for number in ("4", "6"))
    by_rank = run_ranks(2, train_starts, first, second)
    assert by_rank[0] == by_rank[1]
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["train"]["micro_batch_size"] == 2, "the search alone would take a larger one"
    assert [origin for _, origin in by_rank[0]] == [
        "command line: --micro-batch-size 2",
        "--auto-layout",
    ]
    capfd.readouterr()
    assert main(third) == 0
    err = capfd.readouterr().err
    assert "--auto-layout chooses dp 1" in err
    assert (
        "it replaces that of the run so far, on 2 ranks" in err
        and "step 4, 32 samples consumed" in err
    )
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["train"]["micro_batch_size"] == 8
    assert (
        json.loads((tmp_path / "environment.json").read_text())["origins"]["train.micro_batch_size"]
        == "--auto-layout"
    )
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert load([f"+config={tmp_path / 'config.yaml'}"]).config.parallel.auto_layout, (
        "it is a valid input"
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--tensor-model-parallel-size", "2"], {"parallel.tensor_model_parallel_size": 2}),
        (["--pipeline-model-parallel-size", "2"], {"parallel.pipeline_model_parallel_size": 2}),
        (["--recompute-granularity", "full"], {"memory.recompute_granularity": "full"}),
    ],
)
def test_settings_of_the_command_line_stay(tmp_path, flags, expected):
    line = arguments(tmp_path, *FLAGS, "--num-layers", "2", *flags)
    config, inputs = choose(line, 0, 4)
    for key, value in expected.items():
        section, name = key.split(".")
        assert getattr(getattr(config, section), name) == value
        assert inputs.origins[key].startswith("command line")
    assert config.train.global_batch_size == 8


def test_of_layouts_that_are_alike_the_simplest_is_chosen(tmp_path, monkeypatch, caplog):
    found: list[Search] = []

    def search_alike(*args: Any, **options: Any) -> Search:
        result = search(*args, **options)
        found.append(replace(result, ties=(result.best[1], result.best[0])))
        return found[0]

    monkeypatch.setattr(auto_layout, "search", search_alike)
    caplog.set_level("INFO", logger="nanotrain")
    config, _ = choose(arguments(tmp_path, *FLAGS, "--num-layers", "2"), 0, 4)
    simplest = found[0].ties[0].scenario.config
    for key in LAYOUT:
        assert value_of(config, key) == value_of(simplest, key), key
    assert "the simplest of the 2 within 5% of the fastest of" in caplog.text


def test_a_layout_that_changed_settings_forbid_is_searched_anew(tmp_path):
    config, _ = choose(arguments(tmp_path, *FLAGS), 0, 2)
    saved = {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in LAYOUT}
    keep = auto_layout._with_saved_layout
    same = SavedLayout(saved, num_ranks=2)
    assert keep(config, same, explicit=frozenset({"model.num_layers"})) == config
    larger = saved | {"train.micro_batch_size": 8}
    assert keep(config, SavedLayout(larger, num_ranks=2), explicit=frozenset()) is None, (
        "2 ranks x 8 samples are no batch of 8"
    )
    on_one_rank = SavedLayout(larger, num_ranks=1)
    assert keep(config, on_one_rank, explicit=frozenset({"train.micro_batch_size"})) is None


def test_it_needs_a_global_batch_and_a_gpu_of_the_planner(tmp_path, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"auto_layout has no global_batch_size: .*; set --global-batch-size"
    ):
        load(arguments(tmp_path, "--auto-layout"))
    monkeypatch.setattr(auto_layout, "device_name", lambda device: "Abacus 9000")
    with pytest.raises(ConfigError, match="unknown GPU Abacus 9000"):
        choose(arguments(tmp_path, *FLAGS), 0, 1)


def test_overlap_of_experts_is_decided_on_gpus_and_said_in_one_line(monkeypatch, caplog):
    caplog.set_level("INFO")
    line = ["+config=qwen3_30b_a3b_512", "--mock-data", "--vocab-size=151936"]
    loaded = load(line)
    start = Start(loaded.config, Launch(0, 0, 512, local_world_size=8))
    inputs = RunInputs(**{each.name: None for each in fields(RunInputs)} | {"origins": {}})
    monkeypatch.setattr(auto_layout, "planned_gpu", lambda _: gpu_of("h100"))
    config, decided = with_expert_overlap(loaded.config, inputs, start=start)
    assert config.parallel.overlap_moe_expert_parallel_comm is True
    assert decided.origins == {"parallel.overlap_moe_expert_parallel_comm": "the plan for this GPU"}
    assert "overlap of tokens on their way: on: " in caplog.text

    def unknown(_):
        raise ConfigError("unknown GPU", why="no row", fix="none")

    monkeypatch.setattr(auto_layout, "planned_gpu", unknown)
    config, _ = with_expert_overlap(loaded.config, inputs, start=start)
    assert not config.parallel.overlap_moe_expert_parallel_comm
    assert "off, unknown GPU" in caplog.text


def test_the_planner_is_asked_only_for_what_the_configuration_leaves_to_it(tmp_path, monkeypatch):
    def ask(*args: Any, **options: Any) -> Any:
        raise AssertionError("nothing is left to the planner")

    monkeypatch.setattr(auto_layout, "with_planned_settings", ask)
    assert main(arguments(tmp_path / "dense", "--train-iters", "1")) == 0
    with pytest.raises(AssertionError, match="nothing is left"):
        main(arguments(tmp_path / "auto", *FLAGS, "--train-iters", "1"))
    loaded = load(["+config=qwen3_30b_a3b_512", "--mock-data", "--vocab-size=151936"])
    start = Start(loaded.config, Launch(0, 0, 512, local_world_size=8))
    monkeypatch.setattr(auto_layout, "planned_gpu", ask)
    inputs = RunInputs(**{each.name: None for each in fields(RunInputs)} | {"origins": {}})
    same, _ = with_planned_settings(loaded.config, inputs, start=start, explicit=frozenset())
    assert same == loaded.config, "a CPU has no overlap to decide"
