"""A sequence length that grows: the same in every layout, after a stop at any step, and as a run of
that length.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.command_line import arguments, assert_same_to_the_bit, run_command_lines, steps_of
from tests.laws.compare import assert_alike
from tests.laws.worlds import GLOBAL_BATCH, SEQ_LENGTH, Case, train_here
from tests.train.small_run import metrics_of

STEPS, OPTIM = 2, {"lr": 3e-3, "adam_eps": 1e-5}
TOKENS = GLOBAL_BATCH * SEQ_LENGTH  # of a step
LENGTHS = [4, 24]  # of the two steps
SCHEDULE = {
    "micro_batch_size": 3,
    "step_seq_length_schedule": [f"{n * TOKENS}:{length}" for n, length in enumerate(LENGTHS)],
}
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.4],
    "moe_z_loss_coeff": 1e-2,
    "moe_expert_capacity_factor": 1.0,
}
DENSE = {"mtp_num_layers": 1, "window_size": 5, "hidden_dropout": 0.2, "attention_dropout": 0.1}
SP = {"sequence_parallel": True}
ROWS: list[tuple[dict[str, Any], int, dict[str, Any], dict[str, Any]]] = [
    (EXPERTS, 4, {"tp": 2, "cp": 2, "etp": 1, "ep": 2}, SP),
    (EXPERTS, 4, {"pp": 2, "ep": 2, "strategy": "optim"}, {"pipeline_schedule": "zb-h1"}),
    (DENSE, 4, {"tp": 2, "pp": 2, "strategy": "optim_grads"}, SP),
    (DENSE, 4, {"cp": 2, "strategy": "optim_grads_params"}, {"cp_comm_type": "a2a"}),
]


@pytest.mark.parametrize(("model", "num_ranks", "sizes", "options"), ROWS, ids=str)
def test_every_layout_trains_as_one_rank_through_changes_of_the_length(
    model: dict[str, Any], num_ranks: int, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    case = Case(STEPS).but(model=model, optim=OPTIM, train=SCHEDULE)
    single = run_ranks(1, train_here, case, shares=True)
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
    outcomes = run_ranks(num_ranks, train_here, case.but(parallel=parallel), **sizes, shares=True)
    assert_alike(outcomes, single, row=str(sizes), lr=OPTIM["lr"])


# 12 samples of 16 tokens per step: three steps of length 4, three of 8, one of 16
STAGES = "--step-seq-length-schedule 0:4 500:8 1000:16 --train-iters 7 --micro-batch-size 2"


def test_a_run_resumes_at_and_between_changes_on_the_same_and_on_other_ranks(
    tmp_path: Path,
) -> None:
    full, halves, other = (tmp_path / name for name in ("full", "halves", "other"))
    run_ranks(
        2,
        run_command_lines,
        arguments(full, STAGES),
        *[arguments(halves, STAGES, "--exit-interval 4")] * 2,
        arguments(other, STAGES, "--exit-interval 3"),
        strategy="optim_grads",
    )
    run_ranks(1, run_command_lines, arguments(other, STAGES))

    assert_same_to_the_bit(halves, full)
    rows, expected = metrics_of(full), steps_of(full)
    assert [row["seq_length"] for row in rows] == [4, 4, 4, 8, 8, 8, 16]
    assert [row["consumed_tokens"] for row in rows] == [12 * 16 * step for step in range(1, 8)]
    for row, reference in zip(steps_of(other), expected, strict=True):
        assert row["loss"] == pytest.approx(reference["loss"], rel=1e-5), row["step"]
        assert row["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5), row["step"]


def test_a_shorter_length_is_a_run_of_that_length_with_as_many_tokens(tmp_path: Path) -> None:
    """In file order the sequences of a sample are consecutive windows, so the batches hold the same
    sequences.
    """
    flags = "--train-iters 3 --no-shuffle --lr-decay-style constant --lr-warmup-iters 0"
    documents = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
    experts = (
        "--num-experts 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.5"
    )
    split = "--step-seq-length-schedule 0:8 100000:16 --micro-batch-size 2 --global-batch-size 6"
    short = "--seq-length 8 --micro-batch-size 4 --global-batch-size 12"
    runs = {tmp_path / "split": split, tmp_path / "short": short}
    run_ranks(
        1,
        run_command_lines,
        *(arguments(folder, flags, documents, experts, text) for folder, text in runs.items()),
    )
    rows, expected = (steps_of(folder) for folder in runs)
    for row, reference in zip(rows, expected, strict=True):
        assert row["consumed_samples"] * 2 == reference["consumed_samples"]
        for name in ("loss", "grad_norm", "consumed_tokens"):
            assert row[name] == reference[name], (row["step"], name)
