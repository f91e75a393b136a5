"""The report of `nanotrain parity`: verdict, tables and JSON."""

import json
from dataclasses import replace

import pytest

from nanotrain.config.config import Config
from nanotrain.parity.report import ParityReport, StepDifference, TensorDifference, relative

STEP = StepDifference(1, loss=2.0, loss_on_one_rank=2.0, grad_norm=0.5, grad_norm_on_one_rank=0.5)


def row(name: str, difference: float) -> TensorDifference:
    return TensorDifference(
        name, (4, 2), sharding="dim 0 by tp=2", absolute=difference, relative=difference
    )


GOOD = ParityReport(
    config=Config(),
    world_size=2,
    tolerance=1e-5,
    steps=(STEP,),
    parameters=(row("a.weight", 5e-5), row("b.weight", 0.0)),
    weights=(row("a.weight", 5e-3),),
    buffers=(row("router.expert_bias", 0.0),),
    unequal_replicas=(),
    samples_read_once=True,
)


def test_differences_within_tolerance_hold():
    assert GOOD.holds and GOOD.verdict == "equal: 2 ranks train as one does, within 1e-05"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"steps": (replace(STEP, loss=2.1),)}, "losses differ by 5.0e-02"),
        ({"steps": (replace(STEP, grad_norm=float("nan")),)}, "gradient norms differ by inf"),
        ({"parameters": (row("a.weight", 2e-4),)}, "1 of 1 gradients differ, a.weight most"),
        ({"weights": (row("a.weight", 0.2),)}, "1 of 2 weights and buffers differ, a.weight most"),
        (
            {"buffers": (row("router.expert_bias", 1.0),)},
            "1 of 2 weights and buffers differ, router.expert_bias most",
        ),
        ({"unequal_replicas": ("a.weight",)}, "replicas of a.weight are not equal"),
        ({"samples_read_once": False}, "samples were left out or read twice"),
    ],
)
def test_every_difference_out_of_tolerance_is_a_complaint(change, complaint):
    report = replace(GOOD, **change)
    assert report.complaints == (complaint,) and not report.holds
    assert report.verdict.startswith("NOT EQUAL") and complaint in report.text()


def test_rows_out_of_tolerance_are_marked():
    text = replace(GOOD, parameters=(row("a.weight", 1.0), row("b.weight", 0.0))).text()
    (marked,) = [line for line in text.splitlines() if line.endswith("<-")]
    assert marked.startswith("a.weight") and "dim 0 by tp=2" in marked and "4x2" in marked


def test_json_has_all_tables_and_no_numbers_that_are_not_finite():
    values = json.loads(replace(GOOD, weights=(row("a.weight", float("inf")),)).to_json())
    assert values["weights"][0]["relative"] is None and not values["equal"]
    assert values["buffers"][0]["name"] == "router.expert_bias" and len(values["parameters"]) == 2


def test_relative_difference_of_a_number_that_is_not_finite_is_infinite():
    assert (
        relative(float("nan"), 1.0)
        == relative(1.0, float("inf"))
        == relative(1.0, 0.0)
        == float("inf")
    )
