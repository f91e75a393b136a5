"""What a rank measures for a card, in a world of threads."""

from pathlib import Path

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.parity.card_ranks import NUM_REPEATED, Measured, RepeatedDataset, measure_rank
from nanotrain.parity.shrink import on_one_rank, shrink
from tests.harness import run_ranks


def measure(ctx: ParallelContext, folder: Path, resumes: int) -> Measured:
    config = on_one_rank(shrink(load(["+config=tiny"]).config, 1, num_steps=3))
    saves_at = 0 if resumes else 2
    return measure_rank(ctx, config, folder=folder, saves_at=saves_at, resumes=resumes)


def test_a_resume_gives_the_losses_of_the_run_and_bytes_are_the_planned_ones(
    tmp_path: Path,
) -> None:
    (whole,) = run_ranks(1, measure, tmp_path, 0, shares=True)
    (resumed,) = run_ranks(1, measure, tmp_path, 2, shares=True)
    assert len(whole.losses) == 3 and resumed.losses == whole.losses[2:]
    assert whole.planned == whole.measured and whole.measured[0] > 10_000


def test_samples_repeat() -> None:
    config = shrink(load(["+config=tiny"]).config, 1, num_steps=1)
    samples = RepeatedDataset(config)
    first, again, other = (samples[number] for number in (1, 1 + NUM_REPEATED, 2))
    assert (first.tokens == again.tokens).all() and not (first.tokens == other.tokens).all()
