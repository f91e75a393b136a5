"""The report of a run that was trained here has the sections that docs/report.md describes."""

import re
from pathlib import Path

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.plan.fitting import require_memory
from nanotrain.plan.plan import plan_run
from nanotrain.report.figures import Figure
from nanotrain.report.history import RunHistory
from nanotrain.report.sections import sections_of
from nanotrain.train.fit import fit
from nanotrain.train.inputs import open_inputs
from nanotrain.train.open_run import open_run
from tests.train.small_run import arguments

PAGE = Path(__file__).parents[2] / "docs" / "report.md"
# sections of runs with experts, a drawn timeline, generated text or several starts
OPTIONAL = {"Experts", "Timeline", "Samples", "Restarts"}


def test_every_described_section_is_on_the_page_of_a_run(tmp_path: Path) -> None:
    line = arguments(tmp_path, "--train-iters", "4", "--eval-interval", "2", "--eval-iters", "1")
    config, inputs = open_inputs(load(line))
    plan = plan_run(config, 1, rank=0)
    memory = require_memory(config, 1, device="cpu", available=None)
    context = ParallelContext.attach(plan.topology)
    with open_run(plan, inputs, context=context, planned=memory) as (run, hooks):
        fit(run, hooks)
    charts: dict[str, Figure] = {}
    sections = dict(sections_of([RunHistory.read(tmp_path)], charts))
    text = PAGE.read_text().split("## What the report shows", 1)[1].split("\n## ")[0]
    described = set(re.findall(r"\*\*(\w+)\*\*", text))
    assert described and described <= set(sections)
    empty = {title for title in described - OPTIONAL if not sections[title]}
    assert not empty
