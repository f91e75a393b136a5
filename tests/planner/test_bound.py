"""The lower bound of the memory of a layout."""

import pytest

from nanotrain.config.load import load
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.memory import estimate_memory
from nanotrain.planner.search import Space

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
