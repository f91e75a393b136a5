"""`python -m nanotrain.train`: exit codes, which rank prints, and the outputs of a run."""

import json
import os
import re

import pytest
import torch

from nanotrain.comm import device
from nanotrain.config.load import load
from nanotrain.errors import CorruptState
from nanotrain.runs.failures import read_failures
from nanotrain.runs.lock import LOCK_NAME
from nanotrain.train import main as entry
from nanotrain.train import open_and_train, phases
from nanotrain.train.main import INTERRUPTED, WAIT_FOR_FIRST_RANK_S, main
from tests.train.small_run import arguments, metrics_of

LAUNCHED = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}

pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture
def naps(monkeypatch) -> list[float]:
    """How long `main` slept; it does not really."""
    slept: list[float] = []
    monkeypatch.setattr(entry.time, "sleep", slept.append)
    return slept


def test_a_run_trains_and_leaves_everything_in_its_folder(tmp_path, capfd):
    assert main(arguments(tmp_path, "--train-iters", "3", "--save-interval", "2")) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "report.html",
        "run.lock",
        "starts.jsonl",
    }
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "step-00000002",
        "step-00000003",
    }
    assert json.loads((tmp_path / "environment.json").read_text())["world_size"] == 1
    out, err = capfd.readouterr()
    assert [line.split(" | ")[0] for line in out.splitlines() if " | " in line] == [
        "step 1/3",
        "step 2/3",
        "step 3/3",
    ]
    assert "layout      1 rank on cpu, no_shard\nprecision   fp32\n" in err
    assert "planned memory per rank:" in err
    assert re.search(r"^memory        planned \d+\.\d MB per rank; measured at most \d", out, re.M)
    assert "of the process before the model" in out


def test_the_configuration_it_writes_is_a_valid_input_for_the_same_run(tmp_path):
    assert main(arguments(tmp_path / "one", "--train-iters", "2")) == 0
    written = tmp_path / "one" / "config.yaml"
    again = load([f"+config={written}"])
    given = load(
        arguments(tmp_path / "one", "--train-iters", "2", "--global-batch-size", "1")
    ).config
    assert again.config == given, (
        "the batch that the number of ranks gave is written, so that a resume keeps it"
    )
    assert main([f"+config={written}", "--run-dir", str(tmp_path / "two")]) == 0
    losses = [[line["loss"] for line in metrics_of(tmp_path / name)] for name in ("one", "two")]
    assert losses[0] == losses[1]


def test_the_same_command_with_more_steps_resumes_and_with_the_same_has_nothing_to_do(
    tmp_path, capfd
):
    assert main(arguments(tmp_path, "--train-iters", "2")) == 0
    capfd.readouterr()
    assert main(arguments(tmp_path, "--train-iters", "4")) == 0
    err = capfd.readouterr().err
    assert "resuming; --no-auto-resume starts a new run" in err
    assert "step-00000002: step 2, 2 samples consumed" in err
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4]
    assert main(arguments(tmp_path, "--train-iters", "4")) == 0
    assert (
        "nothing to do: step 4 of 4 is done; a larger --train-iters goes on"
        in capfd.readouterr().err
    )
    assert main(arguments(tmp_path, "--train-iters", "0")) == 0
    assert "--train-iters 0: everything is built, nothing is trained" in capfd.readouterr().err
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4]


def test_deterministic_mode_is_on_while_a_run_trains(tmp_path, monkeypatch):
    seen, train = [], phases.fit
    cudnn, matmul, fill = (
        torch.backends.cudnn,
        torch.backends.cuda.matmul,
        torch.utils.deterministic,
    )
    reduces = matmul.allow_bf16_reduced_precision_reduction
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")

    def note(run, hooks, **options):
        goes_on = train(run, hooks, **options)
        seen.append(
            (
                torch.get_deterministic_debug_mode(),
                cudnn.deterministic,
                fill.fill_uninitialized_memory,
            )
        )
        seen.append((os.environ["NCCL_ALGO"], os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        seen.append((matmul.allow_bf16_reduced_precision_reduction,))
        return goes_on

    monkeypatch.setattr(phases, "fit", note)
    flags = ["--train-iters", "1", "--bf16", "--no-save"]
    try:
        assert main(arguments(tmp_path / "off", *flags)) == 0
        flags += ["--deterministic-mode", "--disable-bf16-reduced-precision-matmul"]
        assert main(arguments(tmp_path / "on", *flags)) == 0
    finally:
        torch.use_deterministic_algorithms(False)
        cudnn.deterministic, fill.fill_uninitialized_memory = False, True
        matmul.allow_bf16_reduced_precision_reduction = reduces
    off = [(0, False, True), ("Ring", None), (reduces,)]
    assert seen == [*off, (2, True, False), ("Ring", ":4096:8"), (False,)]


def test_a_mistake_is_one_message_and_exit_code_2(tmp_path, capfd, naps):
    assert main(arguments(tmp_path, "--hiden-size", "3")) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert naps == []


def test_a_rank_that_is_not_the_first_of_its_machine_waits_for_that_one_to_print(
    tmp_path, capfd, naps, monkeypatch
):
    # torchrun ends it while it waits; if it is still alive, it is the only rank with the error and
    # prints it.
    monkeypatch.setenv("LOCAL_RANK", "1")
    (tmp_path / "file").touch()
    assert main(arguments(tmp_path / "file" / "run")) == 2
    assert naps == [WAIT_FOR_FIRST_RANK_S]
    assert capfd.readouterr().err.count("error: ") == 1


def test_a_rank_that_became_the_first_prints_and_notes_an_error_at_once(
    tmp_path, capfd, naps, monkeypatch
):
    def train_with_restarts(config, launch, *, train, become_first):
        become_first()
        raise CorruptState("replicas differ")

    monkeypatch.setattr(open_and_train, "train_with_restarts", train_with_restarts)
    for name, value in (LAUNCHED | {"RANK": "1", "LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / LOCK_NAME).touch()
    assert main(arguments(folder)) == 2
    assert naps == [], capfd.readouterr().err
    assert [failure.rank for failure in read_failures(folder)] == [1]


@pytest.mark.parametrize("local_rank", ["0", "1"])
@pytest.mark.parametrize("flag", ["--run-dir", "--save-fallback-dir", "--tensorboard-dir"])
def test_folders_that_a_run_writes_are_tried_before_a_device_is_on_every_rank(
    tmp_path, capfd, monkeypatch, flag, local_rank
):
    def touched(*_arguments):
        raise AssertionError("a device was touched")

    monkeypatch.setattr(device, "pick_device", touched)
    monkeypatch.setattr(entry.time, "sleep", lambda _seconds: None)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", local_rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    (tmp_path / "run").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "run" / "checkpoints").symlink_to(
        tmp_path / ("file" if flag == "--run-dir" else "other")
    )
    (tmp_path / "other").mkdir()
    flag_of_folder = "--save-fallback-dir" if flag == "--run-dir" else flag
    assert main(arguments(tmp_path / "run", flag_of_folder, str(tmp_path / "file" / "sub"))) == 2
    error = capfd.readouterr().err
    assert error.count("error: ") == 1 and f"choose another folder with {flag}" in error
    assert re.search(
        "(run/checkpoints|file/sub) cannot be written: (File exists|Not a directory)", error
    ), error
    assert not list((tmp_path / "other").iterdir())


def test_a_port_that_is_no_number_is_one_error(tmp_path, capfd, monkeypatch):
    for name, value in (LAUNCHED | {"MASTER_PORT": "abc"}).items():
        monkeypatch.setenv(name, value)
    assert main(arguments(tmp_path)) == 2
    error = capfd.readouterr().err
    assert error.startswith(
        "error: MASTER_PORT is 'abc' in the environment: it must be a whole number"
    )
    assert error.count("\n") == 1


@pytest.mark.parametrize("size", ["0", "two", "-1", ""])
def test_a_world_size_that_is_no_number_of_ranks_is_a_mistake(tmp_path, capfd, monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    assert main(arguments(tmp_path)) == 2
    assert f"WORLD_SIZE is {size!r}" in capfd.readouterr().err


def test_an_interrupt_before_the_first_step_is_reported_without_a_traceback(
    tmp_path, capfd, monkeypatch
):
    def interrupted(loaded, reporter):
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "train", interrupted)
    assert main(arguments(tmp_path)) == INTERRUPTED == 130
    assert capfd.readouterr().err == "interrupted\n"


def test_an_error_of_our_own_keeps_its_traceback(tmp_path, monkeypatch):
    def broken(loaded, reporter):
        raise AssertionError("an invariant")

    monkeypatch.setattr(entry, "train", broken)
    with pytest.raises(AssertionError, match="an invariant"):
        main(arguments(tmp_path))


@pytest.mark.parametrize("question", ["--help", "--cfg job"])
def test_a_request_for_text_is_printed_by_one_rank_and_nothing_is_trained(
    tmp_path, capfd, monkeypatch, question
):
    for local_rank, is_answered in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert main([*arguments(tmp_path / "run"), *question.split()]) == 0
        assert bool(capfd.readouterr().out) is is_answered, local_rank
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("existed", [False, True])
def test_a_refused_run_leaves_no_folder(tmp_path, capfd, existed):
    folder = tmp_path / "a"
    if existed:
        folder.mkdir()
    assert (
        main(
            [
                "--data-path",
                str(tmp_path / "nowhere"),
                "--vocab-size",
                "64",
                "--run-dir",
                str(folder),
            ]
        )
        == 2
    )
    assert "nowhere.idx does not exist" in capfd.readouterr().err
    (tmp_path / "a/failures/rank-00000.json").unlink(missing_ok=True)  # a note on an older run
    left = [path.name for path in tmp_path.rglob("*") if path.name != "failures"]
    assert left == (["a", "run.lock"] if existed else [])
