"""The text and the values of a calendar."""

from dataclasses import replace
from datetime import date

from nanotrain.planner.calendar_screen import RunCalendar
from nanotrain.planner.run_calendar import Component, RunConditions

RUN = RunConditions(
    step_s=864.0,
    num_steps=1000,
    num_gpus=16,
    gpus_per_host=8,
    components=(),
    restart_s=0.0,
    save_interval=0,
    save_stall_s=0.0,
    spare_hosts=1,
    repair_s=3600.0,
)


def test_a_run_without_failures_ends_on_its_day():
    text = RunCalendar.of(RUN, start=date(2027, 1, 1), gpu_hour_price=2.5).text().splitlines()
    assert (
        text[0]
        == "calendar    1,000 steps of 864.000 s on 16 GPUs and 1 spare host, from 2027-01-01"
    )
    assert text[1].split() == ["steps", "10.00", "days", "100.0%"]
    assert text[2] == "goodput     100.0% of the time is steps"
    assert text[3] == "failures    none"
    assert text[4] == "median      2027-01-11, 10.0 days, 5,760 GPU-hours, cost 14,400"
    assert text[6] == (
        "saves       at the end, 0.0 s each; best: every 1,000 steps, goodput 100.0% in the long run"
    )
    assert text[7] == "spares      1 host; none is needed: no host is ever in repair"


def test_values_have_no_cost_without_a_price_and_an_interval_without_failures_is_unset():
    values = RunCalendar.of(RUN, start=date(2027, 1, 1)).values()
    assert values["late_date"] == "2027-01-11" and values["median_days"] == 10.0
    assert values["between_failures_s"] is None and "median_cost" not in values
    assert values["conditions"]["num_gpus"] == 16 and values["seconds"]["steps"] == 864_000


def test_failures_are_named_by_component():
    parts = (
        Component("GPU", 5.0, detect_s=1.0, takes_host=True),
        Component("host", 0.0, detect_s=1.0, takes_host=True),
    )
    run = replace(RUN, components=parts, save_interval=1)
    line = RunCalendar.of(run, start=date(2027, 1, 1)).text().splitlines()
    failures = next(text for text in line if text.startswith("failures"))
    assert "one in 300.0 hours: GPU" in failures and "host" not in failures
