"""A batch that grows: the same samples and losses in every layout, and a stop in the middle changes
nothing.
"""

import math
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.laws.command_line import arguments, assert_same_to_the_bit, run_command_lines, steps_of

# 4 4 4 4 8 8 12 12 samples
RAMP = """--rampup-batch-size 4 4 30 --global-batch-size 12 --train-iters 8 --micro-batch-size 2
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-samples 10"""
SIZES = [4, 4, 4, 4, 8, 8, 12, 12]


def lr_after(samples: int) -> float:
    """The learning rate of a step: from 0 over ten samples, then a cosine to the end of the run."""
    if samples <= 10:
        return 1e-3 * samples / 10
    return 1e-4 + 9e-4 * (1 + math.cos(math.pi * (samples - 10) / (sum(SIZES) - 10))) / 2


def test_a_ramp_up_resumes_in_the_middle_on_the_same_and_on_other_ranks(tmp_path: Path) -> None:
    full, halves, other, piped = (tmp_path / name for name in ("full", "halves", "other", "piped"))
    stop = "--exit-interval 5"
    run_ranks(
        2,
        run_command_lines,
        arguments(full, RAMP),
        *[arguments(halves, RAMP, stop)] * 2,
        arguments(other, RAMP, stop),
        strategy="optim_grads",
    )
    run_ranks(1, run_command_lines, arguments(other, RAMP))
    run_ranks(
        2, run_command_lines, arguments(piped, RAMP, "--pipeline-model-parallel-size 2"), pp=2
    )

    assert_same_to_the_bit(halves, full)
    expected = steps_of(full)
    assert [step["consumed_samples"] for step in expected] == [
        sum(SIZES[: n + 1]) for n in range(8)
    ]
    rates = [lr_after(sum(SIZES[:n])) for n in range(8)]
    assert [step["lr"] for step in expected] == pytest.approx(rates, rel=1e-9), (
        "of the samples before each step"
    )
    for folder in (other, piped):
        for row, reference in zip(steps_of(folder), expected, strict=True):
            for name in ("loss", "grad_norm"):
                assert row[name] == pytest.approx(reference[name], rel=1e-5), (
                    folder.name,
                    row["step"],
                    name,
                )
            assert (row["lr"], row["consumed_tokens"]) == (
                reference["lr"],
                reference["consumed_tokens"],
            )
