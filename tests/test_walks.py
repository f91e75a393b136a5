"""Files that a reader opens to follow a command line, a prediction and the memory of a rank.

docs/planner.md states the numbers. The first call of a process enters further files, as what many
layouts share is kept. `tests/train/test_step.py` counts those of a training step and of a save.
"""

import re

from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.plan.memory_plan import plan_memory
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.prediction import predict
from nanotrain.planner.scenario import scenario_of
from tests.walks import PACKAGE, files_entered

ARGUMENTS = ["+config=tiny", "--vocab-size", "2048"]


def stated(walk: str) -> int:
    """The number of files of a walk in the page."""
    page = (PACKAGE.parent / "docs/planner.md").read_text()
    number = re.search(rf"\| {walk} \| (\d+) \|", page)
    assert number is not None, walk
    return int(number.group(1))


def test_a_prediction_enters_the_files_that_the_page_counts() -> None:
    config = load_line(parse(ARGUMENTS)).config
    gpu = gpu_of("h100")
    predict(scenario_of(config, 8, gpu=gpu))
    scenario = scenario_of(config, 8, gpu=gpu)
    files = files_entered(lambda: predict(scenario))
    assert len(files) == stated("`predict`"), sorted(files)


def test_the_memory_of_a_rank_enters_the_files_that_the_page_counts() -> None:
    config = load_line(parse(ARGUMENTS)).config
    plan_memory(config, 8, pp_rank=0, device="cuda")
    files = files_entered(lambda: plan_memory(config, 8, pp_rank=0, device="cuda"))
    assert len(files) == stated("`plan_memory` of a GPU"), sorted(files)


def test_a_command_line_enters_the_files_that_the_page_counts() -> None:
    load_line(parse(ARGUMENTS))
    line = parse(ARGUMENTS)
    files = files_entered(lambda: load_line(line))
    assert len(files) == stated("`load_line`"), sorted(files)
