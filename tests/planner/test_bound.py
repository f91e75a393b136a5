"""The lower bound of the memory of a layout."""

import pytest

from nanotrain.config.load import load
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.memory import estimate_memory
from nanotrain.planner.search import Space, layout_of

SMALL = ["+config=llama1b", "--mock-data", "--global-batch-size", "32"]
EXPERTS = ["+config=tiny_moe", "--mock-data", "--global-batch-size", "32"]


def space_of(flags, world_size):
    config = load(flags).config
    return Space(config, world_size, gpu=gpu_of("h100"), engine="nanotrain", max_tp=8)


@pytest.mark.parametrize(("flags", "world_size"), [(SMALL, 8), (EXPERTS, 4)])
def test_the_bound_of_memory_is_never_above_the_exact_bytes(flags, world_size):
    space = space_of(flags, world_size)
    candidates = list(space.candidates())
    assert len(candidates) > 10
    for candidate in candidates[:: max(1, len(candidates) // 12)]:
        assert candidate.least_bytes <= estimate_memory(candidate.scenario).total


@pytest.mark.parametrize("name", ["zb-v", "dualpipev"])
def test_the_bound_holds_for_stages_in_a_v(name):
    values = layout_of(load(SMALL).config) | {"pipeline_model_parallel_size": 4, "pipeline_schedule": name}
    candidate = space_of(SMALL, 8).candidate(values | {"num_virtual_stages_per_pipeline_rank": 2})
    assert candidate is not None
    assert 0.7 * estimate_memory(candidate.scenario).total < candidate.least_bytes
    assert candidate.least_bytes <= estimate_memory(candidate.scenario).total
