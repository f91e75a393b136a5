"""`nanotrain parity --keep-precision`: in 16 and 8 bits right layouts are equal, and bugs are told
from roundings.
"""

import json
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

import pytest

from nanotrain.cli.main import main
from nanotrain.config.config import Config
from nanotrain.parity.by_perturbation import (
    FEW_RUNS,
    MORE_RUNS,
    PerturbedRuns,
    judge,
    record_perturbed,
)
from nanotrain.parity.check import Record, compare, record_steps
from nanotrain.parity.perturbed_report import LIMIT, PerturbedReport
from nanotrain.parity.shrink import on_one_rank
from tests.harness import run_ranks
from tests.parity.planted import BUGS, RIGHT, Bug, record_with_bug, small_config

# With many runs the noise of a perturbation is known better; a factor beyond this needs none.
CERTAIN = 4
IN_OTHER_DTYPES = (RIGHT[0], RIGHT[6])


@cache
def one_rank(config: Config, first: int, count: int) -> list[Record]:
    """One rank, perturbed by the seeds from `first` on; 0 is without a perturbation."""
    runs = PerturbedRuns(config, range(first, first + count))
    (records,) = run_ranks(1, record_perturbed, runs, shares=True)
    return records


def records_of(config: Config, world: int, work: Callable[..., Record], *args: Any) -> list[Record]:
    layout = {field.name: getattr(config.parallel, field.name) for field in fields(config.parallel)}
    return run_ranks(world, work, config, *args, shares=work is record_steps, **layout)


def judged(config: Config, records: list[Record]) -> PerturbedReport:
    single = on_one_rank(config)
    reference, *perturbed = one_rank(single, 0, 1 + FEW_RUNS)
    report = judge(reference, records, perturbed=perturbed, config=config)
    if LIMIT < report.largest_factor < CERTAIN:
        perturbed += one_rank(single, 1 + FEW_RUNS, MORE_RUNS)
        report = judge(reference, records, perturbed=perturbed, config=config)
    return report


def of_layout(arguments: str, world: int, dtype: str) -> PerturbedReport:
    config = small_config(arguments, world, dtype=dtype)
    return judged(config, records_of(config, world, record_steps))


@pytest.mark.parametrize("layout", RIGHT, ids=lambda layout: layout[0])
def test_a_right_layout_in_bf16_is_within_the_last_bits(layout: tuple[str, int]) -> None:
    report = of_layout(*layout, "bf16")
    assert report.holds, report.text()
    assert report.verdict.startswith(f"equal: {layout[1]} ranks train as one does")


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
@pytest.mark.parametrize("layout", IN_OTHER_DTYPES, ids=lambda layout: layout[0])
def test_a_right_layout_in_fp16_and_fp8_is_within_the_last_bits(
    layout: tuple[str, int], dtype: str
) -> None:
    report = of_layout(*layout, dtype)
    assert report.holds, report.text()
    rounds = {"fp16": 2**-11, "fp8": 2**-4}
    assert report.size == rounds[dtype]


# too small beside the rounding of bf16, in one step of a small model
MISSED = (
    "balance loss doubled, coefficient 0.01",
    "optim/replicas-in-the-norm",
    "train/loss-of-own-targets",
)


@pytest.mark.parametrize(
    "bug", [bug for bug in BUGS if bug.name not in MISSED], ids=lambda b: b.name
)
def test_a_bug_is_told_from_roundings_in_bf16(bug: Bug) -> None:
    config = small_config(bug.arguments, 2, dtype="bf16")
    report = judged(config, records_of(config, 2, record_with_bug, bug))
    assert report.is_over_limit and not report.holds, report.text()


def test_a_wrong_divisor_is_found_that_a_fixed_bound_misses() -> None:
    """A fixed bound has to let the right layouts pass, of which experts differ most."""
    config = small_config(RIGHT[6][0], 2, dtype="bf16")
    right = of_fixed_bound(config, records_of(config, 2, record_steps))
    (bug,) = [bug for bug in BUGS if bug.name == "one token less in the divisor"]
    config = small_config(bug.arguments, 2, dtype="bf16")
    wrong = records_of(config, 2, record_with_bug, bug)
    assert of_fixed_bound(config, wrong) < right
    assert judged(config, wrong).is_over_limit


def of_fixed_bound(config: Config, records: list[Record]) -> float:
    """The least tolerance with which the records count as those of one rank."""
    (reference,) = one_rank(on_one_rank(config), 0, 1)
    return compare(reference, records, config=config, tolerance=1e-5).needed_tolerance


def test_the_command_judges_in_the_precision_of_the_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "--world-size 2 --steps 1 --keep-precision --json +config=tiny --params-dtype bf16"
    assert main(["parity", *line.split()]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["equal"] and written["num_runs"] == FEW_RUNS and written["size"] == 2**-8
    assert written["config"]["precision"]["params_dtype"] == "bf16"
    assert {row["name"] for row in written["weights"]} == {
        row["name"] for row in written["gradients"]
    }
    assert not any("precision" in line or "fp32" in line for line in written["left_out"])
