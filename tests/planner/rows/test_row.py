"""Cells of a row as text, numbers and words."""

import pytest

from nanotrain.errors import ConfigError
from nanotrain.planner.rows.row import ABOVE_ONE, Row


@pytest.mark.parametrize("text", ["", "-", "N/A", "unknown", " ? "])
def test_an_unstated_cell_is_empty(text: str) -> None:
    assert Row({"tp": text}).text("tp") == ""
    assert Row({"tp": text}).number("tp") is None


def test_numbers_as_people_write_them() -> None:
    row = Row({"hidden": "14,336", "seq": "8_192", "layers": "32.0", "heads": "none", "ffn": "big"})
    assert [row.number(column) for column in ("hidden", "seq", "layers")] == [14336, 8192, 32]
    assert row.number("heads") is None
    with pytest.raises(ConfigError, match="ffn is 'big'"):
        row.number("ffn")
    with pytest.raises(ConfigError, match="heads is not stated"):
        row.required("heads")


def test_hyphens_and_underscores_are_spaces() -> None:
    row = Row({"zero": "Dist-Opt", "precision": "bf16", "overlap_flags": "tp_comm_overlap=8"})
    assert row.words() == "dist opt bf16 tp comm overlap=8 "
    assert row.has("zero", "dist opt") and not row.has("precision", "dist opt")
    assert row.number_after("overlap_flags", r"overlap=(\d+)") == 8
    assert row.number_after("zero", r"(\d+)") is None
    assert row.choice("strategy", "zero") == "optim"


def test_numbers_above_one() -> None:
    for text, is_above in (("1", False), ("2", True), ("10", True), ("", False)):
        assert Row({"tp": text}).has("tp", ABOVE_ONE) == is_above


def test_virtual_stages_are_open_in_interleaved_pipelines_only() -> None:
    assert Row({}).leaves_open("mbs") and not Row({"mbs": "1"}).leaves_open("mbs")
    assert not Row({}).leaves_open("vp")
    assert Row({"overlap_flags": "interleaved", "pp": "4"}).leaves_open("vp")
    assert not Row({"flags": "bf16"}).leaves_open("mbs")
