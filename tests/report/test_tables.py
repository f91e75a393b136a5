"""Tables: escaped cells, units, and the settings that differ."""

from pathlib import Path

from nanotrain.report import tables
from nanotrain.report.history import RunHistory
from tests.report.runs import write_run


def test_cells_are_escaped_and_marked() -> None:
    html = tables.html_table(["a"], [["<x>"], ["y"]], marked=frozenset({"y"}))
    assert "&lt;x&gt;" in html and '<td class="differs">y</td>' in html and html.count("differs") == 1


def test_a_summary_has_units_and_dashes_for_what_is_unknown(tmp_path: Path) -> None:
    run = RunHistory.read(write_run(tmp_path / "a", steps=3))
    row = tables.summary_of(run)
    assert (row["step"], row["loss"], row["validation"], row["tokens"]) == ("3/40", "2.6667", "-", "192")
    assert (row["hours"], row["saved"]) == ("0.03", "-")


def test_settings_that_one_run_does_not_have_differ(tmp_path: Path) -> None:
    first = RunHistory.read(write_run(tmp_path / "a"))
    second = RunHistory.read(write_run(tmp_path / "b", config={"train": {"train_iters": 40, "seed": 1}}))
    assert tables.config_differences([first, second]) == {"optim.lr": ["0.1", ""]}
    assert tables.config_differences([first]) == {}


def test_the_environment_has_versions_and_command_but_no_nested_tables(tmp_path: Path) -> None:
    html = tables.environment_table([RunHistory.read(write_run(tmp_path / "a"))])
    assert "2.13.0" in html and "train &lt;b&gt;" in html and "origins" not in html and "memory" not in html
