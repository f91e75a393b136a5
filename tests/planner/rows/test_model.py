"""The model section of a row: published models are found by their sizes."""

from nanotrain.planner.rows.config import scenario_of_row
from nanotrain.planner.rows.row import Row
from tests.planner.rows.test_config import EXPERTS


def test_what_a_published_model_has_is_found_by_its_sizes() -> None:
    row = Row(EXPERTS)
    shape = scenario_of_row(row).shape
    assert shape.mla is not None and shape.mla.q_lora_rank == 1536
    assert (sum(shape.moe_layers), shape.ffn_size, shape.moe_ffn_size) == (58, 18432, 2048)
    assert shape.num_mtp_layers == 1
    assert any("as published" in text for text in row.assumed)
    assert scenario_of_row(Row(EXPERTS | {"note": "(w/o MTP)"})).shape.num_mtp_layers == 0
    cut = scenario_of_row(Row(EXPERTS | {"layers": "8"})).shape
    assert (sum(cut.moe_layers), cut.num_mtp_layers) == (7, 0)


def test_head_channels_of_a_published_model_are_its_own() -> None:
    cells = {
        "layers": "48",
        "hidden": "2048",
        "heads": "32",
        "kv_heads": "4",
        "ffn": "768",
        "experts": "128",
    }
    shape = scenario_of_row(Row(EXPERTS | cells | {"pp": "1"})).shape
    assert (shape.head_dim, shape.has_qk_norm) == (128, True)
