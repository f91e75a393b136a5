"""Tables: escaped cells, units, and the settings that differ."""

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
