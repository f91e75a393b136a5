"""The settings that enable a tracker, and a tracker from outside the package."""

import json
from pathlib import Path
from typing import Any

import pytest

from nanotrain.config.load import load
from nanotrain.train.hooks.track import TrackHook
from nanotrain.train.run import Run
from nanotrain.train.trackers.table import TRACKERS, TrackerRow, enabled_trackers
from tests.train.small_run import small_run, train


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("", []),
        ("--tensorboard", ["tensorboard"]),
        ("--trackers wandb mlflow", ["wandb", "mlflow"]),
        ("--trackers mlflow --prometheus-port 9400", ["prometheus", "mlflow"]),
        ("--trackers wandb --wandb --wandb-project p", ["wandb"]),
        ("--tensorboard-dir events", ["tensorboard"]),
    ],
)
def test_a_tracker_is_enabled_by_its_name_or_its_setting(line, names):
    train = load(["--mock-data", *line.split()], to_train=False).config.train
    assert enabled_trackers(train) == names
    assert train.wandb == ("wandb" in names) and train.tensorboard == ("tensorboard" in names)


class LinesTracker:
    """A line of JSON per step."""

    def __init__(self, run: Run) -> None:
        self._file = (run.folder.path / "lines.jsonl").open("w")

    def write(self, step: int, values: dict[str, Any]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self, *, failed: bool) -> None:
        self._file.close()


def test_a_tracker_from_outside_is_a_class_and_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRACKERS, "lines", TrackerRow(LinesTracker))
    with small_run(tmp_path, "--train-iters", "2", "--trackers", "lines") as run:
        train(run, TrackHook())
    rows = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and all("loss" in row for row in rows)
