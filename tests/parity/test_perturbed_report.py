"""The report of `nanotrain parity --keep-precision`: verdict, tables and JSON."""

import json
from dataclasses import replace
from math import inf, nan

import pytest

from nanotrain.config.config import Config
from nanotrain.parity.perturbation import Deviation, Noise
from nanotrain.parity.perturbed_report import LIMIT, PerturbedReport, Row

NOISE = Noise(norm=0.01, along=0.001)


def row(name: str, factor: float) -> Row:
    return Row.of(name, Deviation(0.01 * factor, 0.0), noise=NOISE, sharding="dim 0 by tp=2")


GOOD = PerturbedReport(
    config=Config(),
    world_size=2,
    size=2**-8,
    num_runs=4,
    steps=(row("step 1 loss", 0.3),),
    gradients=(row("a.weight", 0.5), row("b.weight", 0.0)),
    weights=(row("a.weight", 0.2),),
    buffers=(row("router.expert_bias", 0.0),),
    unequal_replicas=(),
    samples_read_once=True,
)


def test_differences_within_the_last_bits_hold():
    assert GOOD.holds and GOOD.largest_factor == 0.5
    assert GOOD.verdict == (
        "equal: 2 ranks train as one does, up to 0.5 times what last bits change (limit 1.5)"
    )
    assert "noise    one rank, 4 times, inputs of layers changed by 2^-8" in GOOD.text()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"steps": (row("step 1 loss", 7.0),)}, "1 of 1 losses and norms, step 1 loss by 7 times"),
        ({"gradients": (row("a.weight", 3.0),)}, "1 of 1 gradients, a.weight by 3 times"),
        ({"weights": (row("a.weight", nan),)}, "1 of 1 weights, a.weight by nan times"),
        ({"buffers": (row("bias", inf),)}, "1 of 1 buffers, bias by inf times"),
        ({"unequal_replicas": ("a.weight",)}, "replicas of a.weight are not equal"),
        ({"samples_read_once": False}, "samples were left out or read twice"),
    ],
)
def test_what_last_bits_do_not_explain_is_a_complaint(change, complaint):
    report = replace(GOOD, **change)
    assert report.complaints == (complaint,) and not report.holds
    assert report.verdict.startswith("NOT EQUAL: 2 ranks do not") and complaint in report.text()


def test_the_limit_itself_is_within_and_rows_beyond_are_marked():
    assert not row("a", LIMIT).is_wrong and row("a", 1.01 * LIMIT).is_wrong
    text = replace(GOOD, gradients=(row("a.weight", 20.0), row("b.weight", 1.0))).text()
    (marked,) = [line for line in text.splitlines() if line.endswith("<-")]
    assert marked.split()[0] == "a.weight" and "dim 0 by tp=2" in marked and "20.00" in marked


def test_json_has_all_rows_and_no_numbers_that_are_not_finite():
    values = json.loads(replace(GOOD, weights=(row("a.weight", inf),)).to_json())
    assert values["weights"][0]["factor"] is None and values["largest_factor"] is None
    assert not values["equal"] and len(values["gradients"]) == 2 and values["limit"] == LIMIT
