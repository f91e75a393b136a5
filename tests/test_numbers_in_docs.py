"""Numbers in the docs that count something of the tree are those of the tree."""

import re
from collections.abc import Callable

import pytest

from nanotrain.interop.hf.families import FAMILIES
from nanotrain.optim.lr import LR_DECAYS
from nanotrain.precision.fp8 import FP8_RECIPES, RECIPES
from tests.harness import ROOT
from tests.laws import (
    test_cuda_graphs,
    test_every_axis,
    test_happens_before,
    test_recompute,
    test_task_rows,
    test_without_gpu,
)
from tests.laws.pairs import FACTORS, make_rows
from tests.laws.test_every_pair import IN_SUITE
from tests.plan.test_saved_bytes import CP_TOLERANCE, TOLERANCE
from tests.scripts import load_script


def in_words(number: int) -> str:
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return words[number] if number < len(words) else {20: "twenty"}.get(number, str(number))


def points_of_first_hour() -> int:
    return len(load_script("first_hour").POINTS)


# page, and a sentence of it with # in place of the number
Count = Callable[[], int]
SENTENCES: tuple[tuple[str, str, Count], ...] = (
    ("README.md", "[# Hugging Face families](docs/families.md)", lambda: len(FAMILIES)),
    ("CHANGELOG.md", "# Hugging Face families in and out", lambda: len(FAMILIES)),
    ("docs/status.md", "of [# families](families.md)", lambda: len(FAMILIES)),
    ("README.md", "in # scaling recipes", lambda: len(RECIPES)),
    ("CHANGELOG.md", "fp8 products in # scaling recipes", lambda: len(FP8_RECIPES)),
    ("docs/status.md", "# scaling recipes", lambda: len(RECIPES)),
    ("docs/status.md", "# learning-rate schedules", lambda: len(LR_DECAYS)),
    ("CHANGELOG.md", "# learning-rate schedules", lambda: len(LR_DECAYS)),
    ("docs/status.md", "| # layouts equal one rank", lambda: len(test_every_axis.LAYOUTS)),
    ("docs/one_step.md", "compares # layouts with one rank", lambda: len(test_every_axis.LAYOUTS)),
    ("docs/one_step.md", "# of them in `make layouts`", lambda: len(test_every_axis.OTHERS)),
    ("tests/laws/README.md", "These are # rows of 8 ranks", lambda: len(test_every_axis.OTHERS)),
    ("docs/status.md", "bit-equal in # cases", lambda: len(test_recompute.ROWS)),
    ("tests/laws/README.md", "a covering array: # rows", lambda: len(make_rows())),
    ("tests/laws/README.md", "two values of # factors", lambda: len(FACTORS)),
    ("tests/laws/README.md", "The suite has # rows", lambda: len(IN_SUITE)),
    ("docs/inference.md", "In # layouts of four ranks", lambda: len(test_task_rows.LAYOUTS)),
    ("docs/inference.md", "with # kinds of layers", lambda: len(test_task_rows.KINDS)),
    ("docs/gpu.md", "With it # layouts and models train", lambda: len(test_cuda_graphs.ROWS)),
    ("docs/status.md", "# layouts and models train to", lambda: len(test_cuda_graphs.ROWS)),
    ("docs/gpu.md", "runs one rank of # layouts", lambda: len(test_happens_before.ROWS)),
    ("docs/gpu.md", "trains # layouts of 1 to 4 ranks", lambda: len(test_without_gpu.CASES)),
    ("docs/gpu.md", "holds it in # cases", lambda: len(test_without_gpu.PLANNED)),
    ("docs/quickstart.md", "performs # steps of a first hour", points_of_first_hour),
    ("docs/status.md", "a block within # %", lambda: round(100 * TOLERANCE)),
    ("docs/status.md", "(cp: # %)", lambda: round(100 * CP_TOLERANCE)),
)


NAMES = [f"{page}-{sentence}" for page, sentence, _ in SENTENCES]  # alike in every worker


@pytest.mark.parametrize(("page", "sentence", "count"), SENTENCES, ids=NAMES)
def test_a_number_is_that_of_the_tree(page: str, sentence: str, count: Count) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    number = re.escape(sentence).replace(r"\#", "(.+)").replace("(.+)", r"(\S+)")
    (found,) = re.findall(number, text)
    assert found in (str(count()), in_words(count())), sentence
