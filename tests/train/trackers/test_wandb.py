"""Weights & Biases, offline: its files are read back, and a run has one id over all its starts."""

import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.log import LogHook
from nanotrain.train.hooks.track import TrackHook
from nanotrain.train.trackers import wandb as wandb_tracker
from tests.harness import HANG_S
from tests.train.small_run import Failing, small_run, train


@pytest.fixture
def offline_wandb(tmp_path, monkeypatch):
    """No key, no netrc, and time for the start of its process on a busy machine."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(wandb_tracker, "_netrc_has", lambda host: False)
    for name in ("WANDB_X_SERVICE_WAIT", "WANDB_INIT_TIMEOUT"):
        monkeypatch.setenv(name, str(HANG_S))


def wandb_records(path) -> Iterator[Any]:
    """The records of a .wandb file: a log in LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, text = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        text, place = text + content[place + 7 : place + 7 + length], place + 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(text)
            text = b""


def finished_records(path) -> list[Any]:
    """The records, once wandb's own process has written the last one, which it may do after
    `finish`.
    """
    deadline, records = time.monotonic() + HANG_S, list(wandb_records(path))
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < deadline, "the file never ends"
        time.sleep(0.05)
        records = list(wandb_records(path))
    return records


def test_wandb_continues_one_run_over_restarts_offline_without_a_key(
    tmp_path, offline_wandb, logged
):
    arguments = (
        "--save-interval",
        "2",
        "--wandb",
        "--wandb-project",
        "test",
        "--lr-decay-style",
        "constant",
    )
    with (
        small_run(tmp_path / "run", "--train-iters", "9", *arguments) as run,
        pytest.raises(RuntimeError),
    ):
        train(run, LogHook(), TrackHook(), CheckpointHook(), Failing(3))
    for last in ("5", "6"):
        time.sleep(1.01 - time.time() % 1)  # wandb names its folders by the second
        with small_run(tmp_path / "run", "--train-iters", last, *arguments) as run:
            train(run, LogHook(), TrackHook(), CheckpointHook())
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    records = [record for file in files for record in finished_records(file)]
    assert len(files) == 3 and {
        record.run.run_id for record in records if record.HasField("run")
    } == {(tmp_path / "run" / "wandb" / "id").read_text()}
    assert all(record.run.resume for record in records if record.HasField("run"))
    assert {record.metric.step_metric for record in records if record.metric.glob_name == "*"} == {
        "step"
    }
    rows = [record.history for record in records if record.HasField("history")]
    steps = [
        int(item.value_json)
        for row in rows
        for item in row.item
        if "step" in (item.key, *item.nested_key)
    ]
    # step 3 was lost and taken again: wandb's own counter goes on, the x axis is the step of the
    # training
    assert steps == [1, 2, 3, 3, 4, 5, 6] and [row.step.num for row in rows] == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
    ]
    assert any(line.startswith("wandb: offline, in ") for line in logged)


def test_a_run_that_is_begun_anew_is_another_one_at_wandb(tmp_path):
    ids = []
    for flag in ("--auto-resume", "--auto-resume", "--no-auto-resume"):
        with small_run(tmp_path, flag) as run:
            ids.append(wandb_tracker._wandb_id(run))
    assert ids[0] == ids[1] != ids[2]
