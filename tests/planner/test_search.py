"""The layouts of a search: they fit, keep what is fixed, and none by hand is faster."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nanotrain.config.load import load
from nanotrain.config.schema import ENTRIES
from nanotrain.errors import ConfigError
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.planner import search as search_module
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.prediction import estimate_memory, memory_of_rank, predict
from nanotrain.planner.scenario import scenario_of
from nanotrain.planner.screen import flags_of
from nanotrain.planner.search import Space, layout_of, next_change, search

SMALL = ["+config=llama1b", "--mock-data", "--global-batch-size", "32"]
EXPERTS = ["+config=tiny_moe", "--mock-data", "--global-batch-size", "32"]


@pytest.fixture(scope="module")
def result():
    return search(load(SMALL).config, 8, gpu=gpu_of("h100"))


def test_the_fastest_comes_first_fits_and_can_be_run_by_its_settings(result):
    config, gpu = load(SMALL).config, gpu_of("h100")
    times = [found.time.total for found in result.best]
    assert times == sorted(times) and all(found.headroom >= 0 for found in result.best)
    chosen = load([*SMALL, *flags_of(result.best[0].scenario.config, config).split()]).config
    assert predict(scenario_of(chosen, 8, gpu=gpu)).time.total == times[0]
    bytes_of = [found.memory.total for found in result.frontier]
    assert bytes_of == sorted(bytes_of, reverse=True) and len(set(bytes_of)) == len(bytes_of)


def test_no_layout_of_the_search_is_slower_than_one_by_hand(result):
    gpu, best = gpu_of("h100"), result.best[0].time.total
    for flags in (
        ["--tensor-model-parallel-size", "2"],
        ["--pipeline-model-parallel-size", "2"],
        [],
    ):
        by_hand = predict(scenario_of(load([*SMALL, *flags]).config, 8, gpu=gpu))
        assert by_hand.headroom < 0 or best <= by_hand.time.total * 1.001


def test_settings_of_the_command_line_stay():
    loaded = load([*SMALL, "--tensor-model-parallel-size", "4", "--sequence-parallel"])
    result = search(loaded.config, 4, gpu=gpu_of("h100"), fixed=loaded.explicit)
    assert {found.scenario.sizes["tp"] for found in result.best} == {4}
    result = search(load(SMALL).config, 2, gpu=gpu_of("h100"), max_tensor_parallel_size=1)
    assert {found.scenario.sizes["tp"] for found in result.best} == {1}


def test_a_model_that_fits_nowhere_is_an_error_with_the_least_bytes():
    config = load(["+config=llama70b", "--mock-data", "--global-batch-size", "8"]).config
    with pytest.raises(ConfigError, match="no layout fits on 2 GPUs of 85 GB"):
        search(config, 2, gpu=gpu_of("h100"))


def test_a_batch_that_no_layout_can_share_is_an_error():
    config = load([*SMALL[:2], "--global-batch-size", "2"]).config
    fixed = frozenset(
        f"parallel.{axis}_parallel_size" for axis in ("tensor_model", "context", "pipeline_model")
    )
    with pytest.raises(ConfigError, match="no layout of 8 GPUs can be formed"):
        search(config, 8, gpu=gpu_of("h100"), fixed=fixed)


def test_the_next_change_is_a_faster_layout_that_fits():
    config = load([*SMALL, "--recompute-granularity", "full"]).config
    prediction = predict(scenario_of(config, 8, gpu=gpu_of("h100")))
    change = next_change(prediction)
    assert change is not None and change.headroom >= 0
    assert change.time.total < prediction.time.total


def test_every_schedule_with_several_stages_is_tried():
    config = load([*SMALL, "--pipeline-model-parallel-size", "2"]).config
    changes = Space(config, 8, gpu=gpu_of("h100"), engine="nanotrain", max_tp=8).changes(config)
    schedules = {change.scenario.config.parallel.pipeline_schedule for change in changes}
    assert schedules == SCHEDULES.keys() - {"gpipe"}


def test_the_flags_of_a_change_give_its_configuration():
    recompute = ["memory.recompute_granularity=selective", "memory.recompute_modules=[mlp]"]
    config = load([*SMALL, *recompute]).config
    space = Space(config, 8, gpu=gpu_of("h100"), engine="nanotrain", max_tp=8)
    changes = list(space.changes(config))
    assert len(changes) > 6
    for change in changes:
        loaded = load(
            [*SMALL, *recompute, *flags_of(change.scenario.config, config).split()]
        ).config
        assert loaded == change.scenario.config, flags_of(change.scenario.config, config)


def space_of(flags, world_size):
    config = load(flags).config
    return Space(config, world_size, gpu=gpu_of("h100"), engine="nanotrain", max_tp=8)


def test_layouts_of_short_sequences_are_changed_too():
    short = [*SMALL, "--seq-length", "512"]
    sizes = {
        change.scenario.config.train.micro_batch_size
        for change in space_of(short, 8).changes(load(short).config)
    }
    assert sizes == {1, 2, 4}, "twice and half of 2"


@pytest.mark.parametrize(("flags", "world_size"), [(SMALL, 8), (EXPERTS, 4)])
def test_a_layout_is_timed_only_if_its_first_pipeline_rank_fits(flags, world_size):
    everything = list(space_of(flags, world_size).candidates())
    assert len(everything) > 10
    needed = sorted(candidate.memory.reserved for candidate in everything)
    small = replace(gpu_of("h100"), memory_bytes=needed[len(needed) // 2])
    for candidate in replace(space_of(flags, world_size), gpu=small).candidates():
        assert candidate.memory.reserved <= small.memory_bytes
        assert candidate.memory == memory_of_rank(candidate.scenario, 0)


def test_a_layout_whose_last_pipeline_rank_is_too_large_is_not_chosen():
    values = layout_of(load(SMALL).config) | {
        "pipeline_model_parallel_size": 4,
        "pipeline_schedule": "gpipe",
    }
    space = space_of(SMALL, 8)
    candidate = space.candidate(values)
    assert candidate is not None
    largest = estimate_memory(candidate.scenario)
    assert largest.reserved > candidate.memory.reserved, "the last rank has the head"
    gpu = replace(space.gpu, memory_bytes=(largest.reserved + candidate.memory.reserved) // 2)
    fixed = frozenset(ENTRIES[name].key for name in values)
    with pytest.raises(ConfigError, match="no layout fits on 8 GPUs"):
        search(candidate.scenario.config, 8, gpu=gpu, fixed=fixed)


def prediction_of(seconds: float, axes: int, *, strategy: str = "optim") -> Any:
    """A prediction of some seconds, with so many kinds of parallelism."""
    sizes = dict.fromkeys(("tp", "cp", "pp"), 1)
    for axis in ("tp", "cp", "pp")[:axes]:
        sizes[axis] = 2
    parallel = SimpleNamespace(
        num_virtual_stages_per_pipeline_rank=1,
        num_distributed_optimizer_instances=1,
        data_parallel_sharding_strategy=strategy,
    )
    scenario = SimpleNamespace(config=SimpleNamespace(parallel=parallel), sizes=sizes)
    return SimpleNamespace(time=SimpleNamespace(total=seconds), scenario=scenario)


def test_of_layouts_that_are_nearly_as_fast_the_simplest_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search_module, "_predictions_that_fit", iter)
    fastest = prediction_of(1.0, 3)
    reduced_often = prediction_of(1.01, 0, strategy="optim_grads")
    simple, as_simple = prediction_of(1.03, 1), prediction_of(1.02, 1)
    slow = prediction_of(1.0 * search_module.TIE + 0.01, 0)
    alike, best = search_module._fastest_layouts([fastest, reduced_often, as_simple, simple, slow])
    assert alike == (as_simple, simple, reduced_often, fastest)
    assert best[:4] == (fastest, reduced_often, as_simple, simple), "by time"
    assert search_module._fastest_layouts([]) == ((), ())
