"""`nanotrain sweep`: which trainings it starts with which arguments, where, and how it ends."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nanotrain.cli.main import main
from nanotrain.cli.sweep import plan_trials
from tests.harness import HANG_S
from tests.report.runs import write_run

# A training that writes down its arguments, and fails with code 3 for a learning rate of 2.
RECORD = 'for last; do :; done\necho "$@" >> log\ncase "$*" in *--lr=2*) exit 3;; esac\n'


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Write a program that stands for `nanotrain train`; returns the arguments that choose it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> list[str]:
        path = tmp_path / "stub"
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)
        return ["--launch-with", f"{shlex.quote(str(path))} 'first word'"]

    return write


def test_every_combination_is_started_with_its_values_and_folder(stub, tmp_path, capfd):
    words = [
        "--over",
        "lr=1e-3,2",
        "--over",
        "train.seed=5,6",
        "--run-dir",
        "runs/a",
        "+config=tiny",
        "--nnodes",
        "2",
    ]
    assert main(["sweep", *stub(RECORD), *words]) == 3
    shared = "first word --nnodes=2 +config=tiny"
    assert (tmp_path / "log").read_text().splitlines() == [
        f"{shared} --lr={lr} train.seed={seed} --run-dir=runs/a/lr={lr},seed={seed}"
        for lr in ("1e-3", "2")
        for seed in (5, 6)
    ]
    captured = capfd.readouterr()
    assert "run 1 of 4: lr=1e-3,seed=5" in captured.out
    assert captured.err.splitlines() == [
        f"error: run lr=2,seed={seed} ended with exit code 3" for seed in (5, 6)
    ]


def test_commands_are_printed_as_a_shell_reads_them(capsys):
    words = [
        "--over",
        "split=969,30,1 9,1,0",
        "--print",
        "--nproc-per-node",
        "2",
        "+config=tiny",
        "--train-iters",
        "7",
    ]
    assert main(["sweep", *words]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[-2:] for line in lines] == [
        [f"--split={split}", f"--run-dir=runs/tiny-sweep/split={split}"]
        for split in ("969,30,1", "9,1,0")
    ]
    assert lines[0][:5] == [
        "nanotrain",
        "train",
        "--nproc-per-node=2",
        "+config=tiny",
        "--train-iters",
    ]


def test_finished_runs_are_not_run_again_and_the_best_is_listed_first(
    stub, tmp_path, monkeypatch, capfd
):
    stub(RECORD)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "stub"))
    saved = {"train": {"train_iters": 40}}
    losses = {"loss": lambda step: 3.0, "valid_loss": lambda step: 5.0}
    write_run(tmp_path / "s" / "lr=1", config=saved | {"optim": {"lr": 1.0}}, **losses)  # finished
    write_run(
        tmp_path / "s" / "lr=4",
        config=saved | {"optim": {"lr": 4.0}},
        steps=30,
        loss=lambda step: 4.0,
    )  # stopped
    assert (
        main(["sweep", "--over", "lr=1,4", "--run-dir", "s", "+config=tiny", "--train-iters=40"])
        == 0
    )
    words = "+config=tiny --train-iters=40 --lr=4 --run-dir=s/lr=4"
    assert (tmp_path / "log").read_text() == f"-m nanotrain train {words}\n"
    out = capfd.readouterr().out
    assert "run 1 of 2: lr=1 has finished before" in out
    assert out.index("lr=4 ", out.index("tokens/s")) < out.index("lr=1 ", out.index("tokens/s"))
    assert "nanotrain compare s/lr=4 s/lr=1" in out


def test_a_run_of_fewer_steps_goes_on_and_one_of_other_settings_is_an_error(
    stub, tmp_path, monkeypatch, capsys
):
    stub(RECORD)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "stub"))
    saved = {
        "train": {"train_iters": 40, "global_batch_size": 16},
        "optim": {"lr": 1.0, "weight_decay": 0.1},
    }
    write_run(tmp_path / "s" / "lr=1", config=saved)
    words = ["sweep", "--over", "lr=1", "--run-dir", "s", "+config=tiny"]
    assert main([*words, "--train-iters", "40"]) == 0
    assert not (tmp_path / "log").exists()
    assert main([*words, "--train-iters", "60"]) == 0
    assert (tmp_path / "log").exists()
    assert main([*words, "--weight-decay", "0.3"]) == 2
    assert (
        "run folder s/lr=1 is not of these settings: it was trained with others"
        in capsys.readouterr().err
    )


def test_a_file_of_a_section_is_a_value(capsys):
    assert main(["sweep", "--over", "model=llama1b,gpt2_124m", "--print", "--mock-data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [shlex.split(line)[3] for line in lines] == ["model=llama1b", "model=gpt2_124m"]


def test_a_stop_lets_the_current_run_save_and_ends_the_sweep(stub, tmp_path):
    text = "trap 'echo saved >> log; exit 0' TERM\necho started >> log\nkill -INT $PPID\nwhile :; do sleep 0.02; done\n"
    words = ["sweep", *stub(text), "--over", "lr=1,2", "+config=tiny"]
    program = f"from nanotrain.cli.main import main; raise SystemExit(main({words!r}))"
    assert subprocess.run([sys.executable, "-c", program], timeout=HANG_S).returncode == 0
    assert (tmp_path / "log").read_text() == "started\nsaved\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("+config=tiny", "the following arguments are required: --over"),
        (
            "--over lr +config=tiny",
            "--over lr: it takes a setting and its values; --over lr=1e-3,3e-4",
        ),
        ("--over lr=1,,2 +config=tiny", "--over lr=1,,2 has an empty value"),
        (
            "--over lr=1 --over lr=2 +config=tiny",
            "--over lr is given twice; --over lr=V1,V2,... with all its values",
        ),
        (
            "--over lr=1,1 +config=tiny",
            "two runs of the sweep would be in a folder lr=1; give each value once",
        ),
        ("--over run-dir=a,b +config=tiny", "a sweep names the run folders itself"),
        ("--over lr=1e-3,x +config=tiny", "run lr=x: optim.lr is 'x': it takes a number"),
        (
            "--over learning_rate=1,2 +config=tiny",
            "run learning_rate=1: unknown flag --learning-rate; did you mean --lr",
        ),
        ("--over lr=1,2 +config=tyni", "run lr=1: there is no recipe 'tyni'"),
        ("--over tp=1,3 --nproc-per-node 2 +config=tiny", "--tensor-model-parallel-size"),
        (
            "--over tensor_model_parallel_size=1,3 --nproc-per-node 2 +config=tiny",
            "run tensor_model_parallel_size=3: ",
        ),
        ("--over lr=1,2 --nnodes 2 +config=tiny", "a sweep on several machines"),
        (
            "--over lr=1,2 --launch-with /absent/x +config=tiny",
            "/absent/x cannot be started: No such file or directory; --launch-with names a program",
        ),
    ],
)
def test_a_mistake_is_one_message_before_anything_runs(
    tmp_path, monkeypatch, capfd, words, message
):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *words.split()]) == 2
    captured = capfd.readouterr()
    assert (
        message in captured.err
        and captured.err.startswith("error: ")
        and "Traceback" not in captured.err
    )
    assert not list(Path().iterdir())


def test_too_many_combinations():
    values = ",".join(map(str, range(101)))
    with pytest.raises(Exception, match="a sweep of more than 1,000 runs"):
        plan_trials([f"seed={values}", f"lr={values}", f"weight_decay={values}"])
