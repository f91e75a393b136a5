"""scripts/first_hour: its table has twenty points, and a point that cannot be run does not hold."""

from types import ModuleType

import pytest

from nanotrain.train.hooks.log import describe
from tests.scripts import load_script
from tests.train.small_run import report_of


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("first_hour")


def test_there_are_twenty_points(script):
    assert len(script.POINTS) == 20 and len(set(script.POINTS.values())) == 20


def test_nothing_holds_where_nothing_ran(script, tmp_path, capsys, monkeypatch):
    """Every command does nothing and prints nothing, so every point that reads one must fail."""
    monkeypatch.setattr(
        script.Hour, "run", lambda self, name, *words, **options: self.output.setdefault(name, "")
    )
    monkeypatch.setattr(script.subprocess, "run", None)
    monkeypatch.setattr(script.subprocess, "Popen", None)
    rows = script.check(script.Hour(tmp_path, 8))
    assert len(rows) == 20 and not [name for name, (holds, _) in rows if holds]
    assert capsys.readouterr().out.count("FAILS") == 20


def test_step_lines_are_read(script, tmp_path):
    lines = [
        describe([report_of(step)], train_iters=8, num_devices=2, width=100) for step in (2, 4)
    ]
    hour = script.Hour(tmp_path, 8, output={"quick": "\n".join(lines)})
    assert script.step_lines(hour)[0]
    hour.output["quick"] += "\nstep 6/8 | loss 2.5"
    assert not script.step_lines(hour)[0]
