"""The command line of `nanotrain verdict`, and its records of real failures."""

import json

import pytest

from nanotrain.cli.main import main
from nanotrain.errors import LocalFault
from nanotrain.runs.failures import RankFailure, write_failure
from nanotrain.runs.verdict import read_verdicts
from tests.train.small_run import arguments


def test_an_attempt_is_judged_and_its_verdict_is_printed_again(tmp_path, capsys):
    (tmp_path / "run.lock").touch()
    write_failure(tmp_path, RankFailure.of(LocalFault("rank 1 ran out of memory"), rank=1))
    assert main(["verdict", str(tmp_path), "--exit-code", "2"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("stop: before a new step, so by its settings: LocalFault: rank 1")
    assert main(["verdict", str(tmp_path)]) == 0
    assert capsys.readouterr().out == line
    assert main(["verdict", "--json", "--run-dir", str(tmp_path)]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["action"], values["rule"]) == ("stop", "out_of_memory")
    assert any("rank 1 on" in fact for fact in values["evidence"])


def test_a_training_that_cannot_write_its_settings_is_stopped(tmp_path, capsys):
    line = arguments(tmp_path / "run", "--train-iters", "1", "--num-attention-heads", "3")
    assert main(["train", *line]) == 2
    capsys.readouterr()
    assert main(["verdict", "--exit-code", "2", *line]) == 0
    out = capsys.readouterr().out
    assert out.startswith("stop: ")
    assert main(["verdict", "--exit-code", "2", "--no-such-flag"]) == 0
    assert capsys.readouterr().out.startswith("stop: the same start fails again: ConfigError")


def test_a_training_that_fails_notes_why(tmp_path, capsys):
    line = arguments(tmp_path, "--train-iters", "2", "--max-consecutive-skips", "1")
    assert main(["train", *line, "--lr", "1e-3", "--init-method-std", "1e30"]) == 2
    capsys.readouterr()
    assert main(["verdict", str(tmp_path), "--exit-code", "2"]) == 0
    assert capsys.readouterr().out.startswith("stop: the same steps follow: TrainingFault: 1 step")
    (verdict,) = read_verdicts(tmp_path)
    assert verdict.rule == "training_fault"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "name a run folder, or the arguments of its training"),
        (["RUN"], "has no verdict"),
        (["/none/at/all"], "/none/at/all is no run folder: there is no such folder"),
        (["RUN", "--since", "5"], "--since without --exit-code has no effect"),
        (["RUN", "--exit-code", "300"], "'300' is no exit code from 0 to 255"),
        (["RUN", "--lr", "1"], "name a run folder, or the arguments of its training"),
    ],
)
def test_what_cannot_be_judged_is_one_message(flags, message, tmp_path, capsys):
    words = [str(tmp_path) if word == "RUN" else word for word in flags]
    assert main(["verdict", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("error:") == 1
