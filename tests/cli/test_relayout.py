"""`nanotrain relayout`: a request in the run folder, the bytes of a plan, and mistakes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanotrain.checkpoint.live import MEMORY_BYTES
from nanotrain.cli.main import main
from nanotrain.config.load import load, to_yaml
from nanotrain.runs.folder import RunFolder
from nanotrain.runs.lock import lock_run
from nanotrain.runs.relayout import read_request

SMALL = "+config=tiny --mock-data --vocab-size 64 --num-layers 2 --hidden-size 32"


@pytest.fixture
def stopped_run(tmp_path: Path) -> Path:
    """The folder of a run on four ranks, at step 3 of 10, which no job trains."""
    folder = tmp_path / "run"
    config = load([*SMALL.split(), "--train-iters", "10", f"train.run_dir={folder}"]).config
    text = to_yaml(config)
    RunFolder(folder).require_writable()
    (folder / "config.yaml").write_text(text)
    RunFolder(folder).add_start(text, step=0, world_size=4)
    (folder / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    return folder


@pytest.fixture
def run(stopped_run: Path) -> Iterator[Path]:
    """The folder of the run while a job trains it."""
    with lock_run(stopped_run):
        yield stopped_run


def test_a_request_has_the_flags_and_the_ranks(run: Path, capsys) -> None:
    assert main(["relayout", str(run), "--ranks", "2", "--tensor-model-parallel-size", "2"]) == 0
    assert "takes the request at its next logged step" in capsys.readouterr().out
    request = read_request(run)
    assert request is not None and request.ranks == 2
    assert request.arguments == ("--tensor-model-parallel-size", "2")


def test_a_second_request_replaces_the_first_and_says_so(run: Path, capsys) -> None:
    line = ["relayout", str(run), "--tensor-model-parallel-size"]
    assert main([*line, "2"]) == 0
    assert "replaced" not in capsys.readouterr().out
    assert main([*line, "4"]) == 0
    assert "a request that the job had not taken is replaced" in capsys.readouterr().out
    request = read_request(run)
    assert request is not None and request.arguments[-1] == "4"


def test_a_run_without_a_job_is_refused(stopped_run: Path, capsys) -> None:
    line = ["relayout", str(stopped_run), "--tensor-model-parallel-size", "2"]
    assert main(line) == 2
    assert "no job trains in" in capsys.readouterr().err
    assert read_request(stopped_run) is None
    assert main([*line, "--plan"]) == 0  # asks nothing


def test_a_plan_of_a_run_asks_nothing(run: Path, capsys) -> None:
    assert (
        main(["relayout", str(run), "--plan", "--json", "--tensor-model-parallel-size", "2"]) == 0
    )
    numbers = json.loads(capsys.readouterr().out)
    assert read_request(run) is None
    assert numbers["buffers_of_a_rank_bytes"] == MEMORY_BYTES
    assert 0 < numbers["most_sent_by_a_rank_bytes"] <= numbers["sent_by_all_ranks_bytes"]


def test_a_plan_of_the_same_layout_sends_nothing(capsys) -> None:
    line = ["relayout", "--plan", "--json", "--from", SMALL, "--world-size", "4"]
    assert main(line) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["sent_by_all_ranks_bytes"] == numbers["rounds"] == 0
    assert main([*line[:2], *line[3:], "--ranks", "2"]) == 0
    assert "sent by all ranks  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--replay-interval 2", "--replay-interval without a second replica"),
        ("--memory-checkpoint-interval 2", "keeps its layout"),
    ],
)
def test_a_run_with_replicas_or_memory_keeps_them(flag: str, message: str, capsys) -> None:
    line = ["relayout", "--plan", "--from", f"{SMALL} {flag}", "--world-size", "2"]
    assert main([*line, "--tensor-model-parallel-size", "2"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tensor-model-parallel-size", "3"], "cannot be shared by tp=3 ranks"),
        ([], "the run has this layout"),
        (["--tensor-model-parallel-size", "1", "--ranks", "4"], "the run has this layout"),
        (["--lr", "1"], "--lr 1 is no setting of the layout"),
        (["+config=tiny"], "is no setting of the layout"),
        (["--ranks", "8"], "there are 4, and no process is started"),
        (["--ranks", "3", "--tensor-model-parallel-size", "2"], "3 ranks cannot form tp=2"),
        (["--tensor-model-parallel-sise", "2"], "--tensor-model-parallel-size"),
        (["--json"], "--json belongs to --plan"),
        (["--from", SMALL, "--world-size", "4"], "give RUN, or"),
    ],
    ids=str,
)
def test_a_mistake_is_one_message_and_no_request(
    run: Path, capsys, words: list[str], message: str
) -> None:
    assert main(["relayout", str(run), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert read_request(run) is None


def test_a_finished_run_and_a_folder_without_a_start_are_refused(
    run: Path, tmp_path: Path, capsys
) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "loss": 1.0}\n')
    assert main(["relayout", str(run), "--tensor-model-parallel-size", "2"]) == 2
    assert "no step is left" in capsys.readouterr().err
    (run / "starts.jsonl").unlink()
    assert main(["relayout", str(run), "--tensor-model-parallel-size", "2"]) == 2
    assert "wait for the first step" in capsys.readouterr().err
    assert main(["relayout", str(tmp_path / "none")]) == 2
