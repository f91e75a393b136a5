"""A run folder is read whatever a crash left in it."""

import json
import os
import tempfile
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.errors import EnvironmentFault
from nanotrain.report.history import Checkpoint, RunHistory, find_runs
from tests.report.runs import expert_load, write_run


def test_columns_hold_every_number_and_gaps_are_nan(tmp_path: Path) -> None:
    run = RunHistory.read(write_run(tmp_path / "a", moe=expert_load))
    assert run.last_step == run.num_steps == 40
    assert run.column("loss")[:2].tolist() == [8.0, 4.0]
    assert np.isnan(run.column("mfu")).all() and np.isnan(run.column("valid_loss")).all()
    assert run.column("moe.max_load")[0] == 2.0
    assert run.load["layers.0"].shape == (40, 3) and run.load["layers.1"][9].tolist() == [60, 0, 0]
    assert run.hours[-1] == pytest.approx(0.4)
    assert run.config["optim.lr"] == 0.1


def test_typical_values_are_those_of_the_newest_rows(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    values = [9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 3.0, None, 2.0]
    rows = [{"step": step, "step_time_s": value} for step, value in enumerate(values, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunHistory.read(tmp_path)
    assert run.typical("step_time_s", 4) == 2.0, "the median of 1, 3 and 2"
    assert run.typical("step_time_s", 1) == 2.0 and run.typical("step_time_s", 2) == 2.0
    assert run.typical("step_time_s", 100) == 9.0
    assert run.typical("mfu", 4) is None


def test_repeated_and_damaged_lines(tmp_path: Path) -> None:
    # Given steps 39 and 40 repeated after a resume, a line of another kind and a line truncated by
    # a crash,
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("ab") as file:
        for step in (39, 40):
            file.write(json.dumps({"step": step, "loss": 0.5}).encode() + b"\n")
        file.write(b"[1, 2]\n\xff\n" + b"[" * 100_000 + b'\n{"step": 41, "lo')
    # when the run is read, then each step appears once, as it was repeated.
    run = RunHistory.read(folder)
    assert run.num_steps == 40
    assert (run.last("loss"), run.last("lr"), run.last("mfu")) == (0.5, 0.1, None), (
        "the repeated steps have no rate"
    )
    assert run.column("loss")[-3:].tolist() == [8.0 / 38, 0.5, 0.5]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", 10**400),
        ("step", -1),
        ("loss", 10**400),
        ("moe", {"load": []}),
        ("moe", {"load": {"layers.0": "x"}}),
    ],
)
def test_numbers_that_no_float_holds_and_wrong_types_are_left_out(
    tmp_path: Path, field: str, value: object
) -> None:
    (tmp_path / "config.yaml").touch()
    row = {"step": 1, "loss": 2.0, "moe": {"load": {"layers.0": [1, 2]}}} | {field: value}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    run = RunHistory.read(tmp_path)
    assert run.num_steps == (field != "step") and (
        field != "loss" or np.isnan(run.column("loss")).all()
    )
    assert (run.load == {}) == (field != "loss")


def test_a_folder_without_metrics_or_with_damaged_files_is_a_run_of_no_steps(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_bytes(b"\xff{")
    (tmp_path / "a" / "environment.json").write_text("[1]")
    run = RunHistory.read(tmp_path / "a")
    assert (run.num_steps, run.last_step, run.config, run.environment, run.last("loss")) == (
        0,
        0,
        {},
        {},
        None,
    )


def test_what_is_not_a_run_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="is not a run folder"):
        RunHistory.read(tmp_path)


def test_state(tmp_path: Path) -> None:
    finished, short = (
        RunHistory.read(write_run(tmp_path / "a")),
        RunHistory.read(write_run(tmp_path / "b", steps=3)),
    )
    assert finished.state() == "finished"
    assert short.state() == "running"
    # One step takes 36 s, so that three minutes without a new one are still normal.
    assert short.state(short.modified_s + 150) == "running"
    assert short.state(short.modified_s + 200) == "stopped"


def test_checkpoints_are_step_folders_only(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    for name in ("step-00000010", "step-00000020.tmp", "other"):
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / "shard").write_bytes(bytes(7))
    assert [(saved.name, saved.num_bytes) for saved in RunHistory.read(folder).checkpoints] == [
        ("step-00000010", 7)
    ]


def test_find_runs_lists_the_newest_first(tmp_path: Path) -> None:
    import os

    for name, changed in (("old", 100), ("new", 200)):
        folder = write_run(tmp_path / name)
        os.utime(folder / "metrics.jsonl", (changed, changed))
    (tmp_path / "no-run").mkdir()
    assert [run.name for run in find_runs(tmp_path)] == ["new", "old"]
    assert [run.name for run in find_runs(tmp_path / "old")] == ["old"]
    assert find_runs(tmp_path / "absent") == []


ROWS = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(1, 9), "step_time_s": st.floats(0, 1e6)},
        optional={
            "loss": st.floats(-1e9, 1e9),
            "mfu": st.none() | st.floats(0, 1),
            "skipped": st.booleans(),
            "count": st.integers(0, 10**15),
            "data_stage": st.sampled_from(["first", "second"]),
            "tasks": st.dictionaries(st.sampled_from("ab"), st.floats(0, 1)),
        },
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=40)
@given(rows=ROWS, loads=st.lists(st.integers(0, 1000), min_size=12, max_size=12))
def test_every_value_that_was_written_is_read_back_at_its_step(
    rows: list[dict[str, Any]], loads: list[int]
) -> None:
    rows = [
        row | {"moe": {"load": {"layers.0": [load, 1], "layers.1": [2, load]}}}
        for row, load in zip(rows, loads, strict=False)
    ]
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.yaml").touch()
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (Path(name) / "metrics.jsonl").write_text(text)
        (Path(name) / "metrics-superseded.jsonl").write_text(text)
        run = RunHistory.read(Path(name))
    last = {row["step"]: row for row in rows}
    steps = sorted(last)
    assert run.column("step").tolist() == steps and run.num_steps == len(steps)
    for name in ("loss", "mfu", "count", "step_time_s", "skipped"):
        expected = [last[step].get(name) for step in steps]
        read = [None if np.isnan(value) else value for value in run.column(name).tolist()]
        assert read == expected, name
    for key in "ab":
        expected = [last[step].get("tasks", {}).get(key) for step in steps]
        read = [None if np.isnan(value) else value for value in run.column(f"tasks.{key}").tolist()]
        assert read == expected, key
    for router, tokens in run.load.items():
        assert tokens.tolist() == [last[step]["moe"]["load"][router] for step in steps]
    assert len(run.load) == (2 if rows else 0)
    stages = [(step, last[step].get("data_stage")) for step in steps]
    runs = groupby((pair for pair in stages if pair[1]), key=lambda pair: pair[1])
    firsts = [(stage, [step for step, _ in pairs]) for stage, pairs in runs]
    assert list(run.stages) == [(stage, part[0], part[-1]) for stage, part in firsts]
    assert list(run.repeated_s) == [row["step_time_s"] for row in rows]


def test_every_field_of_starts_samples_and_checkpoints_is_read_back(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    starts = [
        {
            "step": 3 * n,
            "time_s": 10.5 + n,
            "world_size": 2 + n,
            "changed": {"a.b": [n, "x"]},
            "in_place": n == 1,
        }
        for n in range(3)
    ]
    (folder / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in starts))
    texts = [{"step": step, "text": f"text {row}"} for row, step in enumerate([4, 7, 4, 9])]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    saved = folder / "checkpoints" / "step-00000010"
    saved.mkdir(parents=True)
    for size in (5, 7):
        (saved / f"shard-{size}").write_bytes(bytes(size))
    os.utime(saved, (1000, 2000))
    run = RunHistory.read(folder)
    assert [asdict(start) for start in run.starts] == [
        row | {"changed": {"a.b": (n, "x")}} for n, row in enumerate(starts)
    ]
    assert {row["step"]: row["text"] for row in run.samples} == {
        4: "text 2",
        7: "text 1",
        9: "text 3",
    }
    assert run.checkpoints == (Checkpoint("step-00000010", 12, 2000.0),)
    environment = json.loads((folder / "environment.json").read_text())
    assert {name: run.environment[name] for name in environment} == environment | {
        "command": ["train", run.environment["command"][1]]
    }
    assert run.world_size == 4
    assert run.modified_s == (folder / "metrics.jsonl").stat().st_mtime
