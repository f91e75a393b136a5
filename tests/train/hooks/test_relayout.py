"""Requests for another layout in a running job of one rank: taken, refused, recorded, resumed."""

from pathlib import Path

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.report.history import RunHistory
from nanotrain.report.tables import speed_facts, starts_table
from nanotrain.runs.relayout import DONE, REQUEST, request_layout
from nanotrain.train.main import main
from nanotrain.untrusted import read_rows
from tests.laws.command_line import arguments, assert_same_to_the_bit, steps_of

STEPS = "--train-iters 4 --save-interval 4 --log-interval 2 --micro-batch-size 2"


def test_a_request_is_taken_recorded_and_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    request_layout(folder, ["--micro-batch-size", "4"], ranks=None)
    assert main(arguments(folder, STEPS)) == 0
    log = capfd.readouterr().err
    assert "relayout after step 2: --micro-batch-size 4" in log
    assert "relayout after step 2 in" in log and "train.micro_batch_size 2 -> 4" in log
    assert not (folder / REQUEST).exists()
    (row,) = read_rows(folder / DONE)
    assert row["step"] == 2 and row["changed"] == {"train.micro_batch_size": [2, 4]}
    assert row["arguments"] == ["--micro-batch-size", "4"] and row["sent_bytes"] == 0
    history = RunHistory.read(folder)
    assert [start.in_place for start in history.starts] == [False, True]
    assert ", in place" in starts_table(history)
    assert speed_facts(history)["Restarts"].value == "0"
    assert [row["restarts"] for row in read_rows(folder / "metrics.jsonl")] == [0] * 4

    assert main(arguments(tmp_path / "stop", STEPS, "--exit-interval 2")) == 0
    assert main(arguments(tmp_path / "stop", STEPS, "--micro-batch-size 4")) == 0
    assert_same_to_the_bit(folder, tmp_path / "stop")

    # the next start has the layout of the run, and the same steps as one with it on its line
    capfd.readouterr()
    assert main(arguments(folder, STEPS, "--train-iters 6")) == 0
    log = capfd.readouterr().err
    assert "the layout is that of the relayout at step 2: train.micro_batch_size 4" in log
    restarts = [row["restarts"] for row in read_rows(folder / "metrics.jsonl")]
    assert restarts == [0] * 4 + [1] * 2
    assert main(arguments(tmp_path / "stop", STEPS, "--train-iters 6 --micro-batch-size 4")) == 0
    assert_same_to_the_bit(folder, tmp_path / "stop")


def test_the_groups_of_a_layout_have_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float] = []
    monkeypatch.setattr(ParallelContext, "set_timeout", lambda self, value: timeouts.append(value))
    folder = tmp_path / "run"
    folder.mkdir()
    request_layout(folder, ["--distributed-timeout-minutes", "3"], ranks=None)
    assert main(arguments(folder, STEPS)) == 0
    assert timeouts == [180]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"arguments": ["--lr", "1"]}', "--lr 1 is no setting of the layout"),
        ('{"arguments": ["--tensor-model-parallel-size", "2"]}', "1 rank"),
        ('{"arguments": [], "ranks": 2}', "--ranks 2"),
        ('{"arguments": ["--micro-batch-size", "2"]}', "the run has this layout"),
        ("{", "use `nanotrain relayout`"),
    ],
)
def test_a_bad_request_is_a_line_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / REQUEST).write_text(text)
    assert main(arguments(folder, STEPS)) == 0
    log = capfd.readouterr().err
    assert "no relayout: " in log and message in log
    assert not (folder / REQUEST).exists() and not (folder / DONE).exists()
    assert [row["step"] for row in steps_of(folder)] == [1, 2, 3, 4]


def test_a_request_at_the_last_step_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    request_layout(folder, ["--micro-batch-size", "4"], ranks=None)
    assert main(arguments(folder, STEPS, "--log-interval 4")) == 0
    assert "no step is left" in capfd.readouterr().err
