"""What `nanotrain plan` prints, draws and refuses."""

import pytest

from nanotrain.config.load import load
from nanotrain.config.schema import with_values
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.prediction import predict
from nanotrain.planner.scenario import scenario_of
from nanotrain.planner.screen import flags_of, parts_of, training_of

RUN = ["+config=llama1b", "--mock-data", "--world-size", "8"]


def test_the_parts_of_a_step_add_up_to_it():
    config = load(["+config=llama1b", "--mock-data", "--pipeline-model-parallel-size", "2"]).config
    time = predict(scenario_of(config, 8, gpu=gpu_of("a100"))).time
    assert sum(parts_of(time).values()) == pytest.approx(time.total)
    assert time.likely[0] < time.total < time.likely[1]


def test_a_training_has_as_many_gpu_hours_as_its_days_and_gpus():
    prediction = predict(scenario_of(load(RUN[:2]).config, 8, gpu=gpu_of("h100")))
    training = training_of(prediction, 1e12)
    assert training["gpu_hours"] == pytest.approx(training["days"] * 24 * 8)
    assert training["days"] * 86_400 * 8 * prediction.time.tokens_per_s_per_gpu == pytest.approx(
        1e12
    )


def test_only_settings_that_differ_are_flags():
    config = load(RUN[:2]).config
    values = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
    assert (
        flags_of(with_values(config, values), config)
        == "--tensor-model-parallel-size 2 --sequence-parallel"
    )


def test_a_batch_that_follows_from_the_layout_is_named():
    config = with_values(load(RUN[:2]).config, {"train.global_batch_size": None})
    chosen = with_values(
        config, {"parallel.tensor_model_parallel_size": 2, "train.global_batch_size": 16}
    )
    assert flags_of(chosen, config) == "--tensor-model-parallel-size 2 --global-batch-size 16"
    grows = {"train.step_batch_size_schedule": ["0:8", "16384:16"]}
    assert (
        flags_of(with_values(chosen, grows), with_values(config, grows))
        == "--tensor-model-parallel-size 2"
    )
