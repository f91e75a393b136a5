"""Rows that are shorter than the sequence are scored several to a sample, in every layout."""

import json
from pathlib import Path

import pytest

from nanotrain.data.tasks import Task, TaskScore, read_task, row_length
from nanotrain.data.tokenizer import ByteTokenizer
from nanotrain.inference.checkpoint import load_stage, open_checkpoint
from nanotrain.inference.score import log_likelihoods
from tests.harness import run_ranks
from tests.laws.command_line import arguments, run_command_lines
from tests.train.small_run import metrics_of

SEQ_LENGTH = 64
FLAGS = f"""--tokenizer-model bytes --vocab-size 260 --seq-length {SEQ_LENGTH} --num-layers 4
    --train-iters 1 --split 1,0,0 --eval-interval 1 --eval-iters 1 --lr-warmup-iters 0 --lr 1e-30
    --adam-eps 1e-5 --micro-batch-size 1 --global-batch-size 4 --init-method-std 0.3 --no-save"""
TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))
VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2"
LAYOUTS = {
    "dp": "",
    "dp, microbatches of 2": "--micro-batch-size 2 --global-batch-size 8",
    "pp": f"{PP} 4",
    "dp pp": f"{PP} 2 --micro-batch-size 2",
    "tp pp": f"{TP} 2 {PP} 2 {VIRTUAL} --sequence-parallel",
    "cp dp": f"{CP} 2",
}
WORDS = ("ab", "cde", "f", "ghij", "kl")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """33 rows of 10 to 16 tokens, in 9 samples: neither is a multiple of a global batch."""
    file = tmp_path_factory.mktemp("task") / "short.jsonl"
    lines = []
    for number in range(10):
        choices = [WORDS[(number + shift) % len(WORDS)] for shift in (0, 1, 3)]
        lines.append({"query": f"q{number} and", "choices": choices, "gold": number % 3})
    lines += [{"context": f"c{number} then", "continuation": WORDS[number]} for number in (0, 3, 4)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def expected(file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The scores by the log-likelihoods of the saved model, one row at a time."""
    folder = tmp_path_factory.mktemp("run") / "run"
    save = "--save-interval 1"
    line = arguments(folder, FLAGS.replace("--no-save", save), "--eval-tasks", f"short={file}")
    run_ranks(1, run_command_lines, line)
    score = score_by_hand(read_task("short", file, tokenizer=ByteTokenizer()), folder)
    values = {f"task/short/{name}": value for name, value in score.to_dict().items()}
    assert metrics_of(folder)[-1]["evaluation"] == pytest.approx(values, rel=1e-5)
    return values


def score_by_hand(task: Task, folder: Path) -> TaskScore:
    assert SEQ_LENGTH // row_length(task, SEQ_LENGTH, multiple=2) == 4
    requests = [(row.tokens[: -row.num_scored], row.tokens[-row.num_scored :]) for row in task.rows]
    stage = load_stage(open_checkpoint(folder))
    scored = log_likelihoods(stage, requests, batch_size=1, max_length=SEQ_LENGTH)
    greedy = [
        len(continuation) * one.is_greedy
        for one, (_, continuation) in zip(scored, requests, strict=True)
    ]
    return task.score([one.log_likelihood for one in scored], greedy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_rows_per_sample_have_the_scores_of_one_row_at_a_time(
    file: Path, expected: dict[str, float], tmp_path: Path, layout: str
) -> None:
    line = arguments(tmp_path / "run", FLAGS, LAYOUTS[layout], "--eval-tasks", f"short={file}")
    run_ranks(4, run_command_lines, line)
    (row,) = metrics_of(tmp_path / "run")
    assert row["evaluation"] == pytest.approx(expected, rel=1e-5)
