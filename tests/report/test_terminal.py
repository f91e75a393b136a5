"""The lists in the terminal fit its width."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from nanotrain.report.history import RunHistory
from nanotrain.report.terminal import common_losses, compare_runs, list_runs
from tests.report.runs import write_run


def printed(function: object, runs: list[RunHistory], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    function(runs, console=console)  # type: ignore[operator]
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.fixture
def runs(tmp_path: Path) -> list[RunHistory]:
    other_settings = {"train": {"train_iters": 40, "seed": 2}, "optim": {"lr": 0.1}}
    return [
        RunHistory.read(write_run(tmp_path / "tiny-a[1]")),
        RunHistory.read(write_run(tmp_path / "b", steps=30, config=other_settings)),
    ]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_list_of_runs_has_one_line_per_run(runs: list[RunHistory], width: int) -> None:
    lines = printed(list_runs, runs, width)
    assert all(len(line) <= width for line in lines) and not any("…" in line for line in lines)
    (first,) = [line for line in lines if "tiny-a[1]" in line]
    assert "finished" in first and "40/40" in first and "0.2000" in first
    assert re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d *$", first) and any(
        "last change (UTC)" in line for line in lines
    )
    assert ("hours" in "\n".join(lines)) is (width >= 110)


def test_a_long_name_is_folded_and_not_cut(tmp_path: Path) -> None:
    runs = [RunHistory.read(write_run(tmp_path / "config=tiny,lr=0.001,optimizer=muon"))]
    lines = printed(list_runs, runs, 80)
    rows = [line.split() for line in lines[3:] if line.strip()]
    assert "".join(row[0] for row in rows) == "config=tiny,lr=0.001,optimizer=muon"
    assert len(rows[0]) > 5 and all(len(row) == 1 for row in rows[1:])  # the time is not wrapped


def test_an_empty_list() -> None:
    assert printed(list_runs, [], 80) == ["no runs"]


def test_a_comparison_shows_results_settings_and_losses(runs: list[RunHistory]) -> None:
    text = "\n".join(printed(compare_runs, runs, 80))
    assert "train.seed" in text and "optim.lr" not in text
    assert [row[0] for row in common_losses(runs)][-1] == "30"
    assert common_losses(runs)[0] == ["1", "8.0000", "8.0000"]
    assert "the settings are equal" in "\n".join(printed(compare_runs, [runs[0], runs[0]], 80))


def test_runs_without_common_steps(tmp_path: Path, runs: list[RunHistory]) -> None:
    empty = RunHistory.read(write_run(tmp_path / "empty", steps=0))
    assert common_losses([runs[0], empty]) == []
    compare_runs([runs[0], empty], console=Console(file=io.StringIO()))
