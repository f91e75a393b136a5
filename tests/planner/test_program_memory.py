"""Memory of other programs: Megatron-LM's is what runs reported, state is that of ZeRO."""

import csv
from pathlib import Path
from statistics import median

import pytest

from nanotrain.planner.prediction import estimate_memory, memory_of_rank
from nanotrain.planner.program_memory import _state_bytes
from nanotrain.planner.rows.config import scenario_of_row
from nanotrain.planner.rows.row import Row
from nanotrain.planner.stage_time import Numel, Stages
from tests.planner.scenarios import llama

MEASURED = list(
    csv.DictReader(Path(__file__).with_name("measured_peaks.tsv").open(), delimiter="\t")
)


def test_megatrons_peak_is_what_runs_reported() -> None:
    """SimuMax reports the rank with the most, Megatron-LM's functional tests the last one, of a run
    on each GPU.
    """
    errors: dict[bool, list[float]] = {True: [], False: []}
    for cells in MEASURED:
        if Row(cells).choice("not modelled", "flags"):
            continue
        scenario, has_flags = scenario_of_row(Row(cells), engine="megatron"), bool(cells["flags"])
        estimate = (
            memory_of_rank(scenario, scenario.sizes["pp"] - 1)
            if has_flags
            else estimate_memory(scenario)
        )
        errors[has_flags].append(abs(estimate.total / int(cells["peak_bytes"]) - 1))
    assert max(errors[False]) < 0.01
    # the rest: golden values of other programs than ran since, and smaller workspaces of torch on
    # Blackwell
    assert sum(error < 0.02 for error in errors[True]) > 0.88 * len(errors[True])
    assert median(errors[True]) < 0.008


@pytest.mark.parametrize(("feature", "streams"), [("grouped products", 4), ("overlapped tp", 3)])
def test_transformer_engine_has_a_workspace_per_stream_of_products(
    feature: str, streams: int
) -> None:
    one, several = (
        estimate_memory(llama(options={"features": frozenset(names)})) for names in ((), (feature,))
    )
    assert several.total - one.total == streams * 32 * 2**20


def test_elements_of_all_ranks_are_those_of_the_model() -> None:
    scenario = llama(16, tp=2, pp=4, gbs=64)
    dense = sum(Stages(scenario).numel(stages).dense for stages in scenario.stages)
    whole, experts, _ = Stages(llama(8)).numel(llama(8).stages[0])
    norms = (2 * 32 + 1) * 4096  # every rank of tp has them
    assert 2 * dense == whole + norms
    assert experts == 0


@pytest.mark.parametrize("engine", ["megatron", "fsdp2"])
def test_every_strategy_divides_its_part_of_the_state_by_the_ranks(engine: str) -> None:
    """ZeRO 1 the optimizer, 2 the gradients too, 3 the parameters too."""
    strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    for stage, strategy in enumerate(strategies):
        two, eight = (
            estimate_memory(llama(size, engine=engine, gbs=64, strategy=strategy))
            for size in (2, 8)
        )
        parts = {"optimizer": 1, "grads": 2, "params": 3}
        for part, first_stage in parts.items():
            ratio = getattr(two, part) / getattr(eight, part)
            assert ratio == pytest.approx(4 if stage >= first_stage else 1), (strategy, part)


@pytest.mark.parametrize("engine", ["megatron", "fsdp2"])
@pytest.mark.parametrize("stage", range(4))
def test_bytes_per_parameter_are_those_of_zero(engine: str, stage: int) -> None:
    """Rajbhandari et al. 2020, section 5: 2 + 4 + 12 bytes of a dense and of an expert parameter,
    each divided by the ranks of its own group from its stage on.
    """
    strategy = ("no_shard", "optim", "optim_grads", "optim_grads_params")[stage]
    experts = {"num_experts": 8, "moe_router_topk": 2, "ep": 4}
    scenario = llama(16, engine=engine, strategy=strategy, tp=2, gbs=64, **experts)
    for field, ranks in (("dense", 8), ("expert", len(scenario.ranks("expert_dp_shard")))):
        numel = Numel(**{"dense": 0, "expert": 0, "tensors": 1} | {field: 3 * 2**20})
        state = _state_bytes(scenario, numel)
        optimizer, params = 12 / (ranks if stage > 0 else 1), 2.0
        grads = 4 / (ranks if stage > 1 else 1)
        if stage == 3:
            params /= ranks
        if engine == "fsdp2" and stage == 3:
            params, optimizer = 4 / ranks, 8 / ranks
        if scenario.engine.memory.keeps_low_precision_grads:
            grads += 2
        sizes = [size / (3 * 2**20) for size in state]
        assert sizes == pytest.approx([params, grads, optimizer]), field
    assert len(scenario.ranks("expert_dp_shard")) < 8
