"""A scenario resolves sizes, stages and the plan of a configuration on a machine, and refuses what
cannot be formed.
"""

from typing import Any

import pytest

from nanotrain.config.load import configure
from nanotrain.errors import ConfigError, TopologyError
from nanotrain.plan.plan import plan_run
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.scenario import scenario_of
from tests.planner.scenarios import llama


def test_sizes_stages_and_microbatches_follow_from_the_configuration() -> None:
    config = configure(
        num_layers=6, vocab_size=1000, pipeline_model_parallel_size=2, tensor_model_parallel_size=2,
        sequence_parallel=True, num_virtual_stages_per_pipeline_rank=3, pipeline_schedule="interleaved",
        global_batch_size=24, micro_batch_size=2, mock_data=True,
    )  # fmt: skip
    scenario = scenario_of(config, 16, gpu=gpu_of("h100"))
    assert (
        scenario.sizes["dp"],
        scenario.pipeline.num_microbatches,
        scenario.pipeline.num_stages,
    ) == (4, 3, 6)
    assert [[list(stage.layers) for stage in stages] for stages in scenario.stages] == [
        [[0], [2], [4]],
        [[1], [3], [5]],
    ]
    plan = plan_run(scenario.config, 16, rank=8)
    assert plan.groups["pp"].index == 1 and [stage.spec for stage in plan.stages] == list(
        scenario.stages[1]
    )


def test_an_unset_global_batch_is_one_microbatch_per_rank() -> None:
    scenario = scenario_of(
        configure(vocab_size=1000, micro_batch_size=2, mock_data=True), 8, gpu=gpu_of("h100")
    )
    assert (scenario.config.train.global_batch_size, scenario.pipeline.num_microbatches) == (16, 1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "fp32"),
        ({"bf16": True}, "bf16"),
        ({"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, "mxfp8"),
    ],
)
def test_products_have_the_type_of_the_precision(values: dict[str, object], expected: str) -> None:
    scenario = scenario_of(
        configure(vocab_size=1000, mock_data=True, **values), 1, gpu=gpu_of("h100")
    )
    assert scenario.matmul_dtype == expected


def test_wrong_layouts_and_batches_are_one_message() -> None:
    config = configure(vocab_size=1000, tensor_model_parallel_size=4, mock_data=True)
    with pytest.raises(TopologyError, match="6 ranks cannot form tp=4"):
        scenario_of(config, 6, gpu=gpu_of("h100"))
    with pytest.raises(ConfigError, match="global batch"):
        scenario_of(
            configure(vocab_size=1000, global_batch_size=3, micro_batch_size=2, mock_data=True),
            1,
            gpu=gpu_of("h100"),
        )
    virtual = {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "global_batch_size": 4,
    }
    config = configure(
        vocab_size=1000, num_layers=4, pipeline_schedule="interleaved", mock_data=True, **virtual
    )
    with pytest.raises(
        ConfigError, match="2 virtual stages per pipeline rank with --engine nanotron"
    ):
        scenario_of(config, 2, gpu=gpu_of("h100"), engine="nanotron")


@pytest.mark.parametrize(("engine", "schedule"), [("megatron", "zb-h1"), ("nanotron", "zb-h1")])
def test_an_engine_has_its_own_pipeline_schedules(engine: str, schedule: str) -> None:
    config = configure(
        vocab_size=1000, num_layers=4, pipeline_model_parallel_size=2, pipeline_schedule=schedule,
        global_batch_size=4, mock_data=True,
    )  # fmt: skip
    assert scenario_of(config, 2, gpu=gpu_of("h100")).engine.name == "nanotrain"
    message = f"--pipeline-schedule {schedule} with --engine {engine}: {engine} has 1f1b and .*set --pipeline-schedule 1f1b"
    with pytest.raises(ConfigError, match=message):
        scenario_of(config, 2, gpu=gpu_of("h100"), engine=engine)


def test_unequal_stages_of_an_engine_that_needs_a_layout_are_balanced() -> None:
    config = configure(
        num_layers=31, vocab_size=128_000, pipeline_model_parallel_size=4, mock_data=True
    )
    scenarios = [
        scenario_of(config, 4, gpu=gpu_of("h100"), engine=name)
        for name in ("nanotrain", "megatron")
    ]
    lengths = [[len(stage.layers) for (stage,) in scenario.stages] for scenario in scenarios]
    assert lengths[0] == [8, 8, 8, 7]
    assert sum(lengths[1]) == 31 and lengths[1][-1] < 7 <= min(lengths[1][:-1])


def test_nanotron_splits_by_weights() -> None:
    config = configure(
        num_layers=16, hidden_size=2048, num_attention_heads=32, ffn_hidden_size=8192, vocab_size=131072,
        pipeline_model_parallel_size=4, mock_data=True,
    )  # fmt: skip
    stages = scenario_of(config, 4, gpu=gpu_of("h100"), engine="nanotron").stages
    # the head counts as 4 layers
    assert [len(stage.layers) for of_rank in stages for stage in of_rank] == [6, 5, 5, 0]


@pytest.mark.parametrize("engine", ["nanotrain", "megatron", "fsdp2"])
@pytest.mark.parametrize(
    ("values", "lengths"),
    [
        ({"decoder_first_pipeline_num_layers": 3}, [3, 9, 9, 9]),
        ({"decoder_last_pipeline_num_layers": 3}, [9, 9, 9, 3]),
        ({"pipeline_model_parallel_layout": "Et*3|t*9|t*9|t*9L"}, [3, 9, 9, 9]),
    ],
)
def test_stages_that_are_set_are_those_of_every_engine(
    engine: str, values: dict[str, Any], lengths: list[int]
) -> None:
    scenario = llama(8, pp=4, num_layers=30, engine=engine, gbs=64, **values)
    assert [len(spec.layers) for (spec,) in scenario.stages] == lengths
