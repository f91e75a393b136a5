"""A blend that is changed while a run trains: the same samples in every layout, and after a resume
to the bit.
"""

from pathlib import Path

import numpy as np
import pytest

from nanotrain.data.mix import DONE, REQUEST, request_mix
from nanotrain.data.order import DataOrder
from tests.harness import run_ranks
from tests.laws.command_line import GLOBAL_BATCH, VOCAB_SIZE, arguments, run_command_lines, steps_of
from tests.laws.megatron_file import write_tokens

EIGHT = "--train-iters 8 --save-interval 2 --log-interval 1 --micro-batch-size 2"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("mix")
    prefixes = [folder / name for name in ("web", "math")]
    for seed, prefix in enumerate(prefixes):
        tokens = np.random.default_rng(seed).integers(0, VOCAB_SIZE // 2, 3000) + seed * (
            VOCAB_SIZE // 2
        )
        write_tokens(prefix, tokens.astype(np.uint16))
    return prefixes


def line(folder: Path, corpora: list[Path], *more: str) -> list[str]:
    web, math = corpora
    full = arguments(folder, EIGHT, *more)
    start = full.index("--data-path")
    return [*full[:start], "--data-path", "9", str(web), "1", str(math), *full[start + 2 :]]


def ask(folder: Path, corpora: list[Path]) -> None:
    folder.mkdir()
    request_mix(folder, ["1", "web", "3", str(corpora[1])], step=5)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in steps_of(folder)]


def test_a_change_is_the_same_in_every_layout_and_after_a_resume(
    corpora: list[Path], tmp_path: Path
) -> None:
    one, two, plain = tmp_path / "one", tmp_path / "two", tmp_path / "plain"
    for folder in (one, two):
        ask(folder, corpora)
    # given a run on one rank, and one that stops before the change and goes on on other ranks
    run_ranks(1, run_command_lines, line(one, corpora), line(plain, corpora))
    run_ranks(2, run_command_lines, line(two, corpora, "--exit-interval 4"))
    run_ranks(1, run_command_lines, line(two, corpora))
    assert (one / DONE).is_file() and not (one / REQUEST).exists()
    # then both trained on the same samples, which are others from step 5 on
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert losses(one)[:4] == losses(plain)[:4]
    assert losses(one)[4] != losses(plain)[4]
    for folder in (one, two):
        order, share = DataOrder.read(folder), {}
        for step in (4, 5, 8):
            tokens = {True: 0, False: 0}
            for use in order.documents(step):
                tokens[use.corpus.prefix == corpora[1]] += use.tokens
            share[step] = tokens[True] / sum(tokens.values())
        assert (
            share[4] <= 2 / GLOBAL_BATCH
            and share[5] >= 8 / GLOBAL_BATCH
            and share[8] >= 8 / GLOBAL_BATCH
        )
    # and a run that goes on from there has the bits of one that never stopped
    three = tmp_path / "three"
    ask(three, corpora)
    run_ranks(1, run_command_lines, line(three, corpora, "--exit-interval 6"), line(three, corpora))
    assert losses(three) == losses(one)


def test_a_run_goes_on_with_its_blend_where_it_cannot_be_changed(
    corpora: list[Path], tmp_path: Path
) -> None:
    unknown, single, damaged = tmp_path / "unknown", tmp_path / "single", tmp_path / "damaged"
    for folder in (unknown, single, damaged):
        folder.mkdir()
        request_mix(folder, ["1", "books"], step=None)
    (damaged / REQUEST).write_text("{")
    run_ranks(
        1,
        run_command_lines,
        line(unknown, corpora),
        arguments(single, EIGHT),
        line(damaged, corpora),
    )
    for folder in (unknown, single, damaged):
        assert (
            len(losses(folder)) == 8
            and not (folder / REQUEST).exists()
            and not (folder / DONE).exists()
        )
