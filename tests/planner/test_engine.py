"""Engines have named sections; a change of some fields leaves the others."""

import pytest

from nanotrain.errors import ConfigError
from nanotrain.planner.engine import SlowTransfer, engine_of, engine_on_cpu, engines, with_sections
from nanotrain.planner.hardware import Link


def test_engines_have_names_and_an_unknown_one_a_message() -> None:
    assert [*engines()] == ["nanotrain", "megatron", "fsdp2", "nanotron"]
    assert all(name == engine.name for name, engine in engines().items())
    with pytest.raises(ConfigError, match="--engine megatron"):
        engine_of("megatrn")


def test_sections_in_sections_are_read() -> None:
    nanotron = engine_of("nanotron")
    assert nanotron.network.link == Link(bandwidth=3.5e10, latency=2.0e-4)
    assert nanotron.pipeline.slow_transfer == SlowTransfer(32.0, 0.77, 0.29)
    assert engine_of("megatron").network.link is None


def test_other_fields_of_a_changed_engine_stay() -> None:
    megatron = engine_of("megatron")
    changed = with_sections(megatron, {"operators": {"fused": False}})
    assert not changed.operators.fused and megatron.operators.fused
    assert with_sections(changed, {"operators": {"fused": True}}) == megatron


def test_a_processor_hides_no_communication() -> None:
    engine = engine_on_cpu(engine_of("nanotrain"))
    assert (engine.overlap.tp, engine.overlap.contention) == ("none", 1.0)
    assert engine.launches.operator_s == engine_of("nanotrain").launches.operator_s
