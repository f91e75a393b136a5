"""Overlap of tokens on their way is on where the plan is faster with it and fits."""

from dataclasses import replace

import pytest

from nanotrain.config.load import load
from nanotrain.planner.expert_overlap import decide_expert_overlap
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.prediction import predict
from nanotrain.planner.scenario import scenario_of

WORLD_SIZE = 512


def decide(*flags, memory_bytes=None, gpu="h100", recipe="qwen3_30b_a3b_512"):
    config = load([f"+config={recipe}", *flags], to_train=False).config
    row = gpu_of(gpu)
    row = replace(row, memory_bytes=memory_bytes or row.memory_bytes)
    return decide_expert_overlap(config, WORLD_SIZE, gpu=row), row


def test_it_is_on_where_the_prediction_is_faster():
    choice, gpu = decide()
    assert choice.config.parallel.overlap_moe_expert_parallel_comm is True
    assert choice.text.startswith("on: ") and "\n" not in choice.text
    off = replace(choice.config.parallel, overlap_moe_expert_parallel_comm=False)
    times = [
        predict(scenario_of(config, WORLD_SIZE, gpu=gpu)).time.total
        for config in (choice.config, replace(choice.config, parallel=off))
    ]
    assert times[1] > 1.01 * times[0]


def test_it_is_off_where_its_memory_does_not_fit():
    on, gpu = decide()
    needed = predict(scenario_of(on.config, WORLD_SIZE, gpu=gpu)).memory.reserved
    choice, _ = decide(memory_bytes=needed - 10**9)
    assert choice.config.parallel.overlap_moe_expert_parallel_comm is False
    assert "with it 1.0 GB more than the GPU has" in choice.text


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--data-parallel-sharding-strategy=optim_grads_params"], "off: overlap_moe_expert"),
        (["--overlap-moe-expert-parallel-comm"], ""),
        (["--no-overlap-moe-expert-parallel-comm"], ""),
    ],
)
def test_what_cannot_overlap_and_what_is_set_stays(flags, text):
    choice, _ = decide(*flags)
    assert choice.text.startswith(text) and bool(choice.text) == bool(text)
    assert not text or ": " in choice.text.removeprefix("off: "), "the reason is a part of it"
    is_on = choice.config.parallel.overlap_moe_expert_parallel_comm
    assert is_on == (flags == ["--overlap-moe-expert-parallel-comm"])


def test_cpus_have_nothing_to_hide():
    choice, _ = decide(gpu="cpu")
    assert not choice.text and choice.config.parallel.overlap_moe_expert_parallel_comm is None
