"""What fixed bounds and perturbation tell from rounding in 16 and 8 bits: layouts and planted bugs.

    python -m benchmarks.parity_tolerances bf16 fp16 fp8

Right layouts first: the least fixed tolerance with which all of them pass is the bound of the dtype. A bug is caught by
that bound if it needs a larger one, and by perturbation as `nanotrain parity --keep-precision` judges. Ranks are threads.
"""

import sys
from collections.abc import Callable
from dataclasses import fields
from functools import cache

from nanotrain.config.config import Config
from nanotrain.parity.by_perturbation import (
    FEW_RUNS,
    MORE_RUNS,
    PerturbedRuns,
    judge,
    record_perturbed,
)
from nanotrain.parity.check import Record, compare, record_steps
from nanotrain.parity.perturbed_report import LIMIT
from nanotrain.parity.shrink import on_one_rank
from tests.harness import run_ranks
from tests.parity.planted import BUGS, RIGHT, Bug, record_with_bug, small_config


@cache
def perturbed(config: Config, first: int, count: int) -> list[Record]:
    """One rank with the perturbations of some seeds."""
    runs = PerturbedRuns(config, range(first, first + count))
    (records,) = run_ranks(1, record_perturbed, runs, shares=True)
    return records


def measure(
    config: Config, world: int, work: Callable[..., Record], *args: Bug
) -> tuple[float, float]:
    """The least fixed tolerance of a layout, and its factor."""
    layout = {field.name: getattr(config.parallel, field.name) for field in fields(config.parallel)}
    records = run_ranks(world, work, config, *args, shares=work is record_steps, **layout)
    single = on_one_rank(config)
    reference, *runs = perturbed(single, 0, 1 + FEW_RUNS)
    report = judge(reference, records, perturbed=runs, config=config)
    if report.is_over_limit:
        runs += perturbed(single, 1 + FEW_RUNS, MORE_RUNS)
        report = judge(reference, records, perturbed=runs, config=config)
    fixed = compare(reference, records, config=config, tolerance=1e-5)
    return fixed.needed_tolerance, report.largest_factor


def main() -> None:
    """Print one table per dtype."""
    for dtype in sys.argv[1:]:
        print(
            f"\n| {dtype} | tolerance it needs | times last bits | fixed | perturbation |\n|---|---:|---:|---|---|"
        )
        bound = 0.0
        for arguments, world in RIGHT:
            config = small_config(arguments, world, dtype=dtype, num_steps=2)
            tolerance, factor = measure(config, world, record_steps)
            bound = max(bound, tolerance)
            print(f"| `{arguments}` | {tolerance:.1e} | {factor:.2g} | | |", flush=True)
        for bug in BUGS:
            tolerance, factor = measure(
                small_config(bug.arguments, 2, dtype=dtype, num_steps=2), 2, record_with_bug, bug
            )
            verdicts = [
                "caught" if wrong else "missed"
                for wrong in (tolerance > bound, not factor <= LIMIT)
            ]
            print(
                f"| {bug.name} | {tolerance:.1e} | {factor:.3g} | {' | '.join(verdicts)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
