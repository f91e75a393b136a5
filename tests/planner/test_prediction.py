"""Predictions: nanotrain's memory is the plan of the run, settings change it as they should."""

from dataclasses import replace
from typing import Any

import pytest

from nanotrain.plan.memory_plan import worst_memory
from nanotrain.planner.engine import engine_of
from nanotrain.planner.prediction import estimate_memory, memory_of_rank, predict
from tests.planner.scenarios import llama

GIB = 2**30


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "optim"},
        {"strategy": "optim_grads_params", "gbs": 32},
        {"tp": 2, "pp": 4, "strategy": "optim", "gbs": 64},
        {"pp": 4, "v": 2, "pipeline_schedule": "interleaved", "gbs": 64},
        {"pp": 2, "pipeline_schedule": "gpipe", "gbs": 48},
        {"pp": 4, "pipeline_schedule": "zb-h1", "gbs": 64, "recompute_granularity": "selective"},
    ],
)
def test_nanotrains_bytes_are_those_that_the_run_plans(values: dict[str, Any]) -> None:
    scenario = llama(16, engine="nanotrain", **values)
    estimate, plan = estimate_memory(scenario), worst_memory(scenario.config, 16, device="cuda")
    assert (estimate.pp_rank, estimate.rows(), estimate.total) == (
        plan.pp_rank,
        plan.rows(),
        plan.total,
    )


@pytest.mark.parametrize("engine", ["nanotrain", "megatron", "fsdp2", "nanotron"])
def test_settings_that_save_memory_save_it(engine: str) -> None:
    def total(**values: Any) -> int:
        return estimate_memory(llama(16, engine=engine, **{"gbs": 64, "tp": 2, **values})).total

    assert total() > total(strategy="optim") > total(strategy="optim_grads_params")
    assert total(strategy="optim") > total(strategy="optim", recompute_granularity="full")
    assert total(strategy="optim", mbs=2) > total(strategy="optim") > total(strategy="optim", pp=2)


def test_what_does_not_fit_has_no_headroom() -> None:
    small, large = (
        predict(llama(8, gpu=gpu, strategy="optim", mbs=4, gbs=64)) for gpu in ("b300", "a100-40gb")
    )
    memory = small.memory
    assert (
        small.headroom
        == small.scenario.gpu.memory_bytes - memory.total - memory.overhead
        > 0
        > large.headroom
    )
    assert memory.overhead > GIB


def test_the_heaviest_rank_is_found_among_unequal_stages() -> None:
    scenario = llama(16, pp=8, gbs=64, decoder_last_pipeline_num_layers=18)
    totals = [memory_of_rank(scenario, rank).total for rank in range(8)]
    assert estimate_memory(scenario).total == max(totals)
    assert estimate_memory(scenario).pp_rank == totals.index(max(totals)) == 7


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipev"])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_the_heaviest_rank_is_found_where_weight_gradients_are_deferred(
    name: str, recompute: str | None
) -> None:
    """What a full recomputation has computed again for an I is kept until its W: on the last ranks
    the longest.
    """
    values = {
        "pipeline_schedule": name,
        "recompute_granularity": recompute,
        "v": 1 if name == "zb-h1" else 2,
    }
    scenario = llama(16, engine="nanotrain", pp=8, gbs=64, strategy="optim", **values)
    assert estimate_memory(scenario).total == max(
        memory_of_rank(scenario, rank).total for rank in range(8)
    )


def test_in_flight_bytes_do_not_depend_on_the_number_of_microbatches() -> None:
    few, many = (estimate_memory(llama(16, pp=4, gbs=size)) for size in (64, 512))
    assert few.activations == many.activations
    gpipe = [
        estimate_memory(llama(16, pp=4, gbs=size, pipeline_schedule="gpipe")) for size in (64, 512)
    ]
    assert gpipe[1].activations == 8 * gpipe[0].activations


def test_engines_differ_in_bytes() -> None:
    megatron = llama(16, gbs=64, strategy="optim")
    nanotron = replace(megatron, engine=engine_of("nanotron"))
    ours, theirs = estimate_memory(megatron), estimate_memory(nanotron)
    assert theirs.grads - ours.grads == ours.params  # gradients in bf16 beside those in fp32
    assert theirs.activations > ours.activations
