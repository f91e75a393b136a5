"""Runs of other programs that go on here, and the numbers that they have to have."""

from pathlib import Path

import pytest

from tests.laws.command_line import steps_of

TOLERANCE = 1e-6
LAYOUTS = {
    "one": "",
    "tp": "--tensor-model-parallel-size 2",
    "pp": "--pipeline-model-parallel-size 2",
    "dp": "--data-parallel-sharding-strategy optim_grads_params",
    "ep": "--expert-model-parallel-size 2",
}


def go_on(
    imported: Path, run: Path, *, layout: str, steps: int, load: Path | None = None
) -> list[str]:
    """The command line with which an imported run goes on, on the tokens of its program.

    Args:
        imported: the imported checkpoint, with its configuration.
        run: the new run folder, two levels below the folder with the tokens.
        layout: a name in LAYOUTS.
        steps: last step.
        load: what is loaded; None for `imported`.
    """
    words = [f"+config={imported / 'config.yaml'}", "--load", str(load or imported)]
    words += ["--data-path", str(run.parents[1] / "tokens"), "--split", "1,0,0", "--no-shuffle"]
    words += ["--run-dir", str(run), "--train-iters", str(steps)]
    words += ["--eval-interval", "0", "--no-report", "--log-interval", "1"]
    return [*words, *LAYOUTS[layout].split()]


def assert_steps(run: Path, theirs: list[tuple[float, float]], *, first: int, last: int) -> None:
    """Assert that a run has the losses and gradient norms of its program, one per step from 1."""
    steps = steps_of(run)
    assert [step["step"] for step in steps] == list(range(first, last + 1))
    for step in steps:
        loss, norm = theirs[step["step"] - 1]
        assert step["loss"] == pytest.approx(loss, rel=TOLERANCE)
        assert step["grad_norm"] == pytest.approx(norm, rel=3 * TOLERANCE)
