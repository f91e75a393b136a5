"""The table of errors of the planner: its numbers in closed form, and the sample."""

from pathlib import Path

import pytest

from benchmarks.plan import SAMPLE, Run, main, regrets, table_of
from nanotrain.planner.rows.table import RowPrediction, read_table


def run(measured: float, predicted: float, *, fits: str = "yes", **cells: str) -> Run:
    prediction = RowPrediction("1", fits, "10", "1", str(predicted), str(predicted / 10_000))
    cells = {
        "source": "a/b@1 x",
        "metric": "tokens_per_s_per_gpu",
        "value": str(measured),
        "gpus": "8",
        **cells,
    }
    return Run(cells, prediction)


def test_errors_of_a_source() -> None:
    lines = table_of([run(100, 110), run(200, 180), run(100, 100, fits="no"), run(400, 400)])
    assert lines[1].split() == ["a/b", "4", "100%", "5.0%", "10.0%", "50.0%", "75%"]


def test_step_times_and_flops_are_throughput() -> None:
    by_time = run(2.0, 1024, metric="step_time_s", gbs="16", seq="1024")
    assert by_time.measured == 1024
    shape = {"layers": "2", "hidden": "1024", "seq": "1024", "vocab": "32768", "recompute": "full"}
    per_token = 96 * 2 * 1024**2 * (1 + 1 / 6 + 1)
    assert run(1.0, 1, metric="tflops_per_gpu", **shape).measured == pytest.approx(1e12 / per_token)


def test_regret_is_what_the_choice_loses() -> None:
    pairs = [(50, 9), (100, 8), (80, 10), (1, 1), (2, 2)]
    layouts = [run(*pair, tp=str(2**power), pp="1") for power, pair in enumerate(pairs)]
    assert regrets(layouts) == ([pytest.approx(0.2)], [pytest.approx(0.5)])
    assert regrets(layouts[:4]) == ([], [])


def test_the_sample_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read_table(SAMPLE)
    assert SAMPLE.stat().st_size <= 120_000 and all(row["source"] for row in rows)
    lines, part = SAMPLE.read_text().splitlines(), tmp_path / "part.tsv"
    stated = [
        line for line in lines[1:] if "not stated" not in line and "not in the table" not in line
    ]
    part.write_text("\n".join([lines[0], *stated[::3]]) + "\n")
    assert main([str(part)]) == 0
    assert "regret of the layout" in capsys.readouterr().out


def test_a_table_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["none.tsv"]) == 2
    assert "cannot read" in capsys.readouterr().err
