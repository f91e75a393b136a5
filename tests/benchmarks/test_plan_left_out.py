"""Constants fitted without a source: the fit, what stands in where no other source has a GPU, and
the table.
"""

import importlib
from collections.abc import Iterator
from math import log
from pathlib import Path
from types import ModuleType

import pytest

from nanotrain.planner.engine import engines
from nanotrain.planner.hardware import gpus

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))  # scripts import each other by their names
    kept = dict(gpus()), dict(engines())
    yield importlib.import_module("benchmarks.plan_left_out")
    for table, rows in zip((gpus(), engines()), kept, strict=True):
        table.update(rows)  # type: ignore[arg-type]


def test_the_fit_finds_the_factor(left_out: ModuleType) -> None:
    curves = [
        [log(measured / (100 * factor)) for factor in left_out.FACTORS] for measured in (85, 85, 95)
    ]
    assert left_out.fit(curves) == pytest.approx(0.85, abs=0.011)


def test_another_architecture_stands_in(left_out: ModuleType) -> None:
    gpus_of = {"a": "A100", "b": "H100", "c": "B200"}
    cells = [
        {"id": f"{name}{run}", "source": name, "hardware": gpus_of[name]}
        for name in "aabbbcc"
        for run in (1, 2)
    ]
    runs = [left_out.Run(each, None) for each in cells]
    logs = {
        each["id"]: [log((0.9 if each["source"] == "b" else 0.8) / x) for x in left_out.FACTORS]
        for each in cells
    }
    without = left_out.factors_without("b", runs, logs)
    assert without["a100", 16] == without["h100", 16] == without["h100", 8] == pytest.approx(0.8)
    few = left_out.factors_without("a", runs[:8], logs)  # four of b alone
    assert few["blackwell", 4] == few["a100", 16] == pytest.approx(0.9)


def test_every_source_has_a_line(
    left_out: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, *lines = left_out.SAMPLE.read_text().splitlines()
    part = [
        line for name in ("llm-foundry", "SimuMax") for line in lines if name in line.split("\t")[1]
    ][::20]
    table = tmp_path / "part.tsv"
    table.write_text("\n".join([header, *part]) + "\n")
    assert left_out.main([str(table)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[1:]] == [
        "mosaicml/llm-foundry",
        "MooreThreads/SimuMax",
    ]
    assert all(line.count("%") == 4 for line in printed[1:])
    assert left_out.main(["none.tsv"]) == 2
