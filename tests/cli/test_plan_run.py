"""The command line of `nanotrain plan --run`: its screen, its inputs, and what it refuses."""

import json
import shlex
from pathlib import Path
from textwrap import indent

import pytest

from nanotrain.cli.main import main
from nanotrain.cli.plan import plan_parser
from nanotrain.cli.plan_run import RUN_FLAGS
from nanotrain.planner.hardware import gpu_of

PAGE = Path(__file__).parents[2] / "docs/planner.md"
RUN = ["+config=llama1b", "--mock-data", "--world-size", "8"]


def test_the_calendar_is_that_of_the_page_and_its_values(capsys):
    block = PAGE.read_text().partition("## When a run ends")[2].split("\n\n")[1]
    _, *line = shlex.split(block)
    assert main(line) == 0
    calendar = capsys.readouterr().out.partition("\n\n")[2]
    assert calendar.startswith("calendar ")
    assert indent(calendar, "    ") in PAGE.read_text(), "the page shows what the command prints"


def test_what_is_given_and_what_follows_from_the_plan_are_conditions_of_a_run(capsys):
    flags = "--run --json --async-save --train-iters 4000 --eval-interval 100 --eval-iters 3"
    given = "--host-failures 0 --restart-s 90 --spare-hosts 1 --gpu-hour-price 3"
    assert main(["plan", *RUN, *flags.split(), *given.split()]) == 0
    values = json.loads(capsys.readouterr().out)
    run = values["run"]
    conditions = run["conditions"]
    assert conditions["num_steps"] == 4000 and conditions["step_s"] == values["step_s"]["total"]
    assert conditions["restart_s"] == 90 and conditions["spare_hosts"] == 1
    assert conditions["evaluation_share"] == pytest.approx(0.01)
    rates = {item["name"]: item["per_1000_gpu_days"] for item in conditions["components"]}
    assert rates == {"GPU": 0.303, "host": 0, "network": 0.055, "software": 0.063, "planned": 0.053}
    # the bytes of a GPU go to the memory of its host, then to the storage
    speeds = gpu_of("h100").host_bandwidth, 0.12e9
    assert conditions["save_lag_s"] / conditions["save_stall_s"] == pytest.approx(
        speeds[0] / speeds[1]
    )
    hours = run["median_days"] * 24
    assert run["median_cost"] == pytest.approx(hours * (8 + 8) * 3)
    assert sum(run["seconds"].values()) >= 4000 * values["step_s"]["total"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*RUN, "--restart-s", "60"], "--restart-s without --run has no effect: add --run"),
        ([*RUN, "--run", "--search"], "--run is of one layout: leave out --search and --rows"),
        ([*RUN, "--run", "--gpu-failures", "-1"], "'-1' is no number of at least 0"),
        ([*RUN, "--run", "--start-date", "soon"], "'soon' is no date such as 2026-12-31"),
        ([*RUN, "--run", "--train-iters", "0"], "the run has no step: --train-iters is 0"),
        (
            [*RUN, "--run", "--software-failures", "1e9"],
            "of its time on steps: a failure comes every",
        ),
        ([*RUN, "--run", "--start-date", "9999-12-31"], "from 9999-12-31 it ends after the year"),
        ([*RUN, "--run", "--repair-hours", "1e12"], "more than 100,000 hosts would be in repair"),
    ],
)
def test_what_is_no_run_is_one_message(flags, message, capsys):
    assert main(["plan", *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_help_and_the_page_name_every_input():
    text = " ".join(plan_parser().format_help().split())
    page = PAGE.read_text().partition("## When a run ends")[2].partition("## Search")[0]
    for flag in RUN_FLAGS:
        assert f"`{flag.flag}`" in page, flag.flag
        assert " ".join(flag.source.split()) in text, flag.flag
