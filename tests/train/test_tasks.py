"""Tasks are scored equally in every layout, and as the log-likelihoods of a model on one device."""

import json
from pathlib import Path

import pytest

from nanotrain.data.tasks import read_task
from nanotrain.data.tokenizer import ByteTokenizer
from nanotrain.inference.checkpoint import load_stage, open_checkpoint
from nanotrain.inference.score import log_likelihoods
from tests.harness import run_ranks
from tests.laws.command_line import arguments, run_command_lines
from tests.train.small_run import metrics_of

TEXT = "the cat sat on a mat and saw two dogs run over the hill while it rained"
WORDS = TEXT.split()
FLAGS = """--tokenizer-model bytes --vocab-size 260 --seq-length 64 --num-layers 2 --train-iters 2 --split 1,1,0
    --eval-interval 1 --eval-iters 1 --lr-warmup-iters 0 --lr 1e-4 --adam-eps 1e-5 --micro-batch-size 1
    --global-batch-size 4 --init-method-std 0.3"""
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24"
TP, PP, CP, EP = (
    f"--{axis}-parallel-size"
    for axis in ("tensor-model", "pipeline-model", "context", "expert-model")
)
SHARDING, VIRTUAL = "--data-parallel-sharding-strategy", "--num-virtual-stages-per-pipeline-rank 2"
DEEP = "--num-layers 4"
LAYOUTS = {
    "dp": f"{SHARDING} optim_grads_params",
    "tp dp": f"{TP} 2 --sequence-parallel --micro-batch-size 2",
    "pp": f"{PP} 4 {DEEP}",
    "tp pp": f"{TP} 2 {PP} 2 {VIRTUAL} {DEEP}",
    "cp tp": f"{CP} 2 {TP} 2",
    "cp pp": f"{CP} 2 {PP} 2 {SHARDING} optim",
}
OF_EXPERTS = {
    "ep": f"{EP} 4",
    "ep tp": f"{EP} 2 {TP} 2",
    "ep pp": f"{EP} 2 {PP} 2 {SHARDING} optim_grads",
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions of all forms; their number is no multiple of the global batch."""
    file = tmp_path_factory.mktemp("task") / "words.jsonl"
    lines = []
    for start in range(2):
        context, right, wrong = (
            " ".join(WORDS[start : start + 5]),
            WORDS[start + 5],
            WORDS[start + 3],
        )
        lines += [
            {"query": context, "choices": [wrong, right, "x"], "gold": 1},
            {"context_options": [context, wrong], "continuation": right, "gold": 0},
            {"context": context, "continuation": right[0], "delimiter": " "},
        ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:5]))
    return file


def lines_of(folder: Path, task: Path, *more: str) -> list[str]:
    return [
        *arguments(folder, FLAGS, *more),
        "--eval-tasks",
        f"words={task}",
        "--eval-num-fewshot",
        "1",
    ]


def evaluations_of(folder: Path) -> list[dict[str, float]]:
    return [row["evaluation"] for row in metrics_of(folder)]


@pytest.mark.parametrize(
    ("layouts", "model"), [(LAYOUTS, ""), (OF_EXPERTS, EXPERTS)], ids=["dense", "experts"]
)
def test_every_layout_gives_the_scores_of_one_rank(
    tmp_path: Path, task: Path, layouts, model: str
) -> None:
    for depth in {DEEP if DEEP in flags else "" for flags in layouts.values()}:
        run_ranks(1, run_command_lines, lines_of(tmp_path / f"single{depth}", task, model, depth))
    for name, flags in layouts.items():
        run_ranks(4, run_command_lines, lines_of(tmp_path / name, task, model, flags, "--no-save"))
        expected = evaluations_of(tmp_path / f"single{DEEP if DEEP in flags else ''}")
        assert len(expected) == 2 and expected[0] != expected[1]
        for scores, reference in zip(evaluations_of(tmp_path / name), expected, strict=True):
            assert scores == pytest.approx(reference, rel=1e-6), name


def test_the_scores_are_those_of_the_saved_model_on_one_device(tmp_path: Path, task: Path) -> None:
    run_ranks(1, run_command_lines, lines_of(tmp_path / "run", task))
    stage = load_stage(open_checkpoint(tmp_path / "run"))
    questions = read_task("words", task, tokenizer=ByteTokenizer(), num_fewshot=1)
    requests = [
        (row.tokens[: -row.num_scored], row.tokens[-row.num_scored :]) for row in questions.rows
    ]
    scored = log_likelihoods(stage, requests, batch_size=4, max_length=64)
    greedy = [
        len(continuation) * one.is_greedy
        for one, (_, continuation) in zip(scored, requests, strict=True)
    ]
    expected = questions.score([one.log_likelihood for one in scored], greedy)
    last = evaluations_of(tmp_path / "run")[-1]
    assert last["task/words/accuracy"] == expected.accuracy
    assert last["task/words/accuracy_per_byte"] == expected.accuracy_per_byte
    assert last["task/words/bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-6)


def test_tasks_are_scored_without_a_validation_split(tmp_path: Path, task: Path) -> None:
    run_ranks(1, run_command_lines, lines_of(tmp_path / "run", task, "--split 1,0,0"))
    assert evaluations_of(tmp_path / "run")[-1]["task/words/questions"] == 5
    assert "valid_loss" not in metrics_of(tmp_path / "run")[-1]
