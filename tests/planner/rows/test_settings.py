"""Settings and options that the words of a row mean."""

import pytest

from nanotrain.planner.rows.config import scenario_of_row
from nanotrain.planner.rows.row import Row
from tests.planner.rows.test_config import DENSE, EXPERTS


@pytest.mark.parametrize(
    ("text", "granularity", "modules"),
    [
        ("full", "full", []),
        ("none", None, []),
        (
            "recompute_granularity = None; recompute_method = None; recompute_num_layers = None",
            None,
            [],
        ),
        (
            'recompute_granularity = "selective"; recompute_modules = ["mla_up_proj"]',
            "selective",
            ["mla_up_proj"],
        ),
        ("selective", "selective", []),
    ],
)
def test_recomputation_as_people_write_it(
    text: str, granularity: str | None, modules: list[str]
) -> None:
    memory = scenario_of_row(Row(DENSE | {"recompute": text})).config.memory
    assert (memory.recompute_granularity, memory.recompute_modules) == (granularity, modules)


def test_selective_recomputation_of_fsdp_programs_takes_as_long_as_every_second_layer() -> None:
    cells = DENSE | {"zero": "fsdp2 full_shard", "pp": "1", "vp": "1", "recompute": "selective"}
    memory = scenario_of_row(row := Row(cells)).config.memory
    assert (memory.recompute_granularity, memory.recompute_num_layers) == ("full", 16)
    assert any("every second product" in text for text in row.assumed)


@pytest.mark.parametrize(
    ("cells", "dispatcher"),
    [
        ({}, "flex"),  # 16 ranks of ep on nodes of 8
        ({"ep": "8"}, "alltoall"),
        ({"overlap_flags": 'moe_token_dispatcher_type = "alltoall"'}, "alltoall"),
        ({"hardware": "GB200"}, "alltoall"),
    ],
)
def test_a_dispatcher_that_is_not_stated_saves_the_network(
    cells: dict[str, str], dispatcher: str
) -> None:
    assert scenario_of_row(Row(EXPERTS | cells)).dispatcher == dispatcher


@pytest.mark.parametrize(
    ("precision", "backend"), [("fp16", "unfused"), ("bf16/fp16", "unfused"), ("bf16", "auto")]
)
def test_attention_of_the_years_of_fp16_is_not_fused(precision: str, backend: str) -> None:
    assert (
        scenario_of_row(Row(DENSE | {"precision": precision})).config.train.attention_backend
        == backend
    )
    stated = DENSE | {"precision": precision, "overlap_flags": "attn=flash"}
    assert scenario_of_row(Row(stated)).config.train.attention_backend == "auto"


def test_overlap_of_tensor_parallelism_is_assumed_for_megatron_only() -> None:
    for zero, overlap in (("dist-opt", "tiles"), ("fsdp2 full_shard", None)):
        row = Row(DENSE | {"zero": zero})
        assert scenario_of_row(row).tp_overlap == overlap, zero
        assert any("overlap of tp" in text for text in row.assumed) == (overlap is not None)
    stated = scenario_of_row(Row(DENSE | {"overlap_flags": "tp_comm_overlap = False"}))
    assert stated.tp_overlap == "none"


def test_uniform_and_block_recomputation_have_a_number_of_layers() -> None:
    for text, method in (("full, num_layers=2", "uniform"), ("full block num_layers=2", "block")):
        memory = scenario_of_row(Row(DENSE | {"recompute": text})).config.memory
        assert (memory.recompute_method, memory.recompute_num_layers) == (method, 2)
