"""Tables: escaped cells, units, and the settings that differ."""

import json
import os
import re
from pathlib import Path

from nanotrain.report import tables
from nanotrain.report.history import RunHistory
from tests.report.runs import write_run


def test_cells_are_escaped_and_marked() -> None:
    html = tables.html_table(["a"], [["<x>"], ["y"]], marked=frozenset({"y"}))
    assert (
        "&lt;x&gt;" in html and '<td class="differs">y</td>' in html and html.count("differs") == 1
    )


def test_a_summary_has_units_and_dashes_for_what_is_unknown(tmp_path: Path) -> None:
    run = RunHistory.read(write_run(tmp_path / "a", steps=3))
    row = tables.summary_of(run)
    assert (row["step"], row["loss"], row["validation"], row["tokens"]) == (
        "3/40",
        "2.6667",
        "-",
        "192",
    )
    assert (row["hours"], row["saved"]) == ("0.03", "-")


def test_settings_that_one_run_does_not_have_differ(tmp_path: Path) -> None:
    first = RunHistory.read(write_run(tmp_path / "a"))
    second = RunHistory.read(
        write_run(tmp_path / "b", config={"train": {"train_iters": 40, "seed": 1}})
    )
    assert tables.config_differences([first, second]) == {"optim.lr": ["0.1", ""]}
    assert tables.config_differences([first]) == {}


def test_the_environment_has_versions_and_command_but_no_nested_tables(tmp_path: Path) -> None:
    html = tables.environment_table([RunHistory.read(write_run(tmp_path / "a"))])
    assert (
        "2.13.0" in html
        and "train &lt;b&gt;" in html
        and "origins" not in html
        and "memory" not in html
    )


def test_a_headline_says_what_a_run_reached_with_units(tmp_path: Path) -> None:
    values = {
        "valid_loss": lambda _: 2.0,
        "evaluation": lambda _: {"task/next-line/accuracy": 0.25},
    }
    run = RunHistory.read(write_run(tmp_path / "a", **values))
    run.environment.update(
        parameters=7e9, active_parameters=7e9, device="H200", layout="4 ranks on H200, tp 2, dp 2"
    )
    facts = tables.headline_of(run)
    run.columns["evaluation.task/next-line/chance"] = run.column("loss") * 0 + 0.125
    by_chance = tables.headline_of(run)["Task next-line"]
    assert by_chance == ("25.0%", "right answers, 12.5% by chance")
    assert (
        facts["Parameters"] == ("7 B", "")
        and facts["Layout"] == ("tp 2, dp 2", "")
        and facts["Device"][0] == "4 x H200"
    )
    assert (facts["Validation loss"][0], facts["Perplexity"][0]) == ("2.0000", "7.39")
    assert facts["Task next-line"] == ("25.0%", "right answers") and facts["Restarts"] == ("0", "")
    assert (
        facts["Throughput"] == ("100", "tokens per second")
        and facts["Training time"][0] == "0.40 hours"
    )
    cards = tables.headline([run])
    assert cards.count("<dt>") == len(facts) and "MFU" not in facts and "Bits per byte" not in facts
    assert tables.headline([run, run]).count("<tr>") == len(facts) + 1


def test_cards_say_what_a_run_cost_and_where_it_comes_from(tmp_path: Path) -> None:
    config = {"data": {"data_path": ["0.7", "/data/web", "3e-1", "s3://bucket/code"]}}
    run = RunHistory.read(write_run(tmp_path / "a", config=config))
    run.environment.update(git_revision="0123456789abcdef", host="node7")
    facts = tables.headline_of(run)
    assert facts["Cost"] == ("1.60", "device hours of training")  # 40 steps of 36 s on 4 ranks
    assert facts["Data"][0] == "web, code"
    assert facts["Revision"] == ("0123456789", "git")
    assert facts["Host"] == ("node7", "of rank 0")
    assert facts["Command"][0] == "train '<b>'"
    card = tables.fact_card("Command", tables.Fact("x" * 60, ""))
    assert card.startswith('<div class="wide">')


def test_a_run_on_random_tokens_says_so(tmp_path: Path) -> None:
    config = {"data": {"mock_data": True, "data_path": []}}
    run = RunHistory.read(write_run(tmp_path / "a", config=config))
    assert tables.corpora_of(run) == ["random tokens"]


def full_run(folder: Path) -> RunHistory:
    """A run in which every fact has a value of its own."""
    values = {
        "loss": lambda step: 3.0 + step,
        "valid_loss": lambda step: 1.0 if step == 9 else None,
        "valid_bits_per_byte": lambda step: 0.75 if step == 9 else None,
        "tokens_per_second": lambda step: 1000.0 * step,
        "mfu": lambda step: step / 100,
        "goodput": lambda step: 0.5 + step / 100,
        "consumed_tokens": lambda step: 5_000_000 * step,
        "step_time_s": lambda step: 360.0 * step,
        "evaluation": lambda _: {"task/sums/accuracy": 0.625, "task/sums/chance": 0.25},
    }
    config = {"train": {"train_iters": 12}, "data": {"data_path": ["2", "/d/one", "1", "/e/two"]}}
    write_run(folder, steps=9, config=config, **values)
    environment = {
        "world_size": 6,
        "parameters": 8_000_000,
        "active_parameters": 3_000_000,
        "device": "H200",
        "layout": "6 ranks, tp 3, dp 2",
        "git_revision": "abcdef0123456789",
        "host": "node7",
        "command": ["train", "a b"],
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    start = {"world_size": 6, "changed": {}}
    rows = [start | {"step": 2 * n, "time_s": 1e6 + 1800 * n} for n in range(3)]
    (folder / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    repeated = [{"step": step, "step_time_s": 1800.0 * step} for step in (1, 2, 3)]
    text = "".join(json.dumps(row) + "\n" for row in repeated)
    (folder / "metrics-superseded.jsonl").write_text(text)
    for step, size in ((4, 1_000_000), (8, 2_000_000)):
        saved = folder / "checkpoints" / f"step-{step:08d}"
        saved.mkdir(parents=True)
        (saved / "shard").write_bytes(bytes(size))
    os.utime(folder / "metrics.jsonl", (0, 1e6 + 4 * 3600))
    return RunHistory.read(folder)


def test_every_fact_has_its_own_value_unit_and_remark(tmp_path: Path) -> None:
    run = full_run(tmp_path / "a")
    assert tables.headline_of(run) == {
        "Progress": ("9 steps", "of 12, stopped"),
        "Parameters": ("8 M", "3 M active per token"),
        "Tokens": ("45 M", "read in training"),
        "Device": ("6 x H200", ""),
        "Layout": ("tp 3, dp 2", ""),
        "Training loss": ("12.0000", "nats per token"),
        "Validation loss": ("1.0000", "nats per token"),
        "Perplexity": ("2.72", "of validation"),
        "Bits per byte": ("0.7500", "of validation"),
        "Task sums": ("62.5%", "right answers, 25.0% by chance"),
        "Throughput": ("5,000", "tokens per second"),
        "MFU": ("5.0%", "of the device's peak"),
        "Goodput": ("59.0%", "steps that count, of all time"),
        "Training time": ("4.50 hours", "4.00 since the first start"),
        "Restarts": ("2", "3 steps again, 3.00 hours"),
        "Cost": ("27.00", "device hours of training"),
        "Data": ("one, two", ""),
        "Revision": ("abcdef0123", "git"),
        "Host": ("node7", "of rank 0"),
        "Command": ("train 'a b'", ""),
    }
    assert tables.summary_of(run) == {
        "run": "a",
        "state": "stopped",
        "step": "9/12",
        "loss": "12.0000",
        "validation": "1.0000",
        "tokens/s": "9,000",
        "hours": "4.50",
        "tokens": "45,000,000",
        "saved": "3.0 MB",
        "last change": "1970-01-12 17:46 UTC",
    }


def test_settings_that_differ_come_first_then_those_that_somebody_has_set(tmp_path: Path) -> None:
    config = {"train": {"a": 1, "b": 1, "c": 1}}
    runs = []
    for name, origins in (("x", {"train.b": "arguments"}), ("y", {"train.a": "default"})):
        run = RunHistory.read(write_run(tmp_path / name, config=config))
        run.config["train.c"] = name
        run.environment["origins"] = origins
        runs.append(run)
    rows = re.findall(r"<tr><td[^>]*>(train.\w)</td>(.*?)</tr>", tables.config_table(runs))
    assert [row for row, _ in rows] == ["train.c", "train.b", "train.a"]
    assert [re.findall(r">([^<]*)</td>", rest) for _, rest in rows] == [
        ["x", "", "y", ""],
        ["1", "arguments", "1", ""],
        ["1", "", "1", "default"],
    ]
