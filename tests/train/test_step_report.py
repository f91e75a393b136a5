"""What a step reports, in numbers and in JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanotrain.config.config import Config, DataConfig
from nanotrain.config.model import ModelConfig
from nanotrain.spec.counts import flops_per_token
from nanotrain.spec.shape import ModelShape
from nanotrain.train.batches import StepSettings
from nanotrain.train.hooks.log import LogHook
from nanotrain.train.parts.part import StepPart, StepParts
from nanotrain.train.step import StepOutput
from nanotrain.train.step_report import (
    MIN_STEPS,
    WINDOW,
    SlowestRank,
    SpikeScore,
    Throughput,
    UnreadReports,
)
from tests.train.small_run import KnownOutput, metrics_of, report_of, small_run, train

FIELDS = [
    *(
        "step",
        "loss",
        "grad_norm",
        "lr",
        "step_time_s",
        "tokens_per_second",
        "mfu",
        "peak_memory_bytes",
    ),
    *(
        "global_batch_size",
        "consumed_samples",
        "consumed_tokens",
        "skipped",
        "data_wait_s",
        "loss_scale",
    ),
]


def test_a_line_of_metrics_has_these_fields():
    assert list(report_of().to_json()) == FIELDS
    assert list(report_of(valid_loss=3.0).to_json()) == [*FIELDS, "valid_loss"]


def test_losses_of_multi_token_prediction_are_in_metrics_jsonl(tmp_path):
    flags = ("--mtp-num-layers", "2", "--train-iters", "2", "--no-save")
    with small_run(tmp_path, *flags) as run:
        train(run, LogHook())
    rows = metrics_of(tmp_path)
    assert [len(row["mtp_losses"]) for row in rows] == [2, 2]
    assert all(4 < loss < 8 for row in rows for loss in row["mtp_losses"]), (
        "near ln 260 at the start"
    )


def test_numbers_that_are_not_finite_are_null():
    line = json.dumps(
        report_of(loss=math.nan, grad_norm=math.inf, skipped=True).to_json(), allow_nan=False
    )
    assert json.loads(line)["loss"] is None and json.loads(line)["grad_norm"] is None


def test_rates_count_all_tokens_of_the_global_batch_and_all_devices(tmp_path):
    with small_run(tmp_path, "--global-batch-size", "6") as run:
        throughput = Throughput.of(run.plan, run.context, seq_length=16)
    assert throughput.tokens_per_second(6, 0.5) == 6 * 16 / 0.5
    assert throughput.flops_per_token == flops_per_token(ModelShape.of(run.config.model), 16)
    assert throughput.mfu(1e9) is None  # nobody knows this CPU's peak


def test_mfu_of_a_known_case():
    # LLaMA-7B at 4096 tokens needs 42,863,689,728 FLOPs a token; an H100 does 989.4e12 a second in
    # bf16.
    llama = ModelConfig(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=11008,
        num_attention_heads=32,
        max_position_embeddings=4096,
        vocab_size=32000,
        untie_embeddings_and_output_weights=True,
    )
    config = replace(Config(), model=llama, data=DataConfig(seq_length=4096))
    needed = flops_per_token(ModelShape.of(config.model), 4096)
    throughput = Throughput(tokens_per_sample=4096, flops_per_token=needed, peak_flops=2 * 989.4e12)
    assert needed == 42_863_689_728
    assert throughput.mfu(20_000.0) == pytest.approx(20_000 * 42_863_689_728 / (2 * 989.4e12))


def test_a_report_reads_its_step_once_and_when_it_is_used():
    reads = []

    class Copy:
        def read(self) -> list[float]:
            return reads.append(1) or [3.0, 0.5, 1.0, 8.0, 2.0, 6.0]

    class Count(StepPart):
        def metrics(self, numbers: Sequence[float]) -> dict[str, float]:
            return {"count": numbers[0]}

    parts = StepParts({"none": StepPart(None), "count": Count(None)}, context=None)
    sizes = {"none": 0, "count": 1}
    output = StepOutput(Copy(), sizes, parts, num_tokens=2, settings=StepSettings())
    report = report_of(7, output=output, step_time_s=0.25, tokens_per_second=400.0, mfu=0.5)
    assert not reads
    row = report.to_json()
    assert len(reads) == 1 and row["count"] == 6.0
    expected = {
        "step": 7,
        "loss": 1.5,
        "grad_norm": 0.5,
        "skipped": True,
        "loss_scale": 8.0,
        "mfu": 0.5,
    }
    assert {name: row[name] for name in expected} == expected
    assert row["tokens_per_second"] == 400.0


def test_reports_that_are_not_ready_are_read_at_a_logged_step_only_and_in_order():
    unread = UnreadReports()
    outputs = [KnownOutput(is_ready=ready) for ready in (False, True, False)]
    reports = [
        report_of(step, output=output, is_logged=False) for step, output in enumerate(outputs)
    ]
    assert [unread.take(report) for report in reports] == [[], [], []], (
        "the second waits for the first"
    )
    outputs[0].is_ready = True
    assert unread.take_ready() == reports[:2]
    last = report_of(4)
    assert unread.take(last) == [reports[2], last] and unread.take_all() == []


def test_deviations_and_spikes_are_those_by_hand():
    draw = np.random.default_rng(0)
    losses = list(3 + 0.1 * draw.standard_normal(WINDOW + 200))
    losses[WINDOW + 150] = 5.0
    score = SpikeScore()
    scores = [score.add(loss) for loss in losses]
    assert scores[:MIN_STEPS] == [None] * MIN_STEPS and scores[MIN_STEPS] is not None
    for step in (MIN_STEPS, 300, WINDOW + 100, WINDOW + 150):
        window = losses[max(0, step - WINDOW) : step]
        assert scores[step][0] == pytest.approx(
            (losses[step] - np.mean(window)) / np.std(window), rel=1e-9
        )
    assert scores[WINDOW + 149][1] == 0.0
    assert scores[WINDOW + 150][0] > 7 and scores[-1][1] == 1 / (len(losses) - MIN_STEPS)


def test_a_loss_that_is_not_finite_is_a_spike_and_changes_no_window():
    score = SpikeScore()
    for loss in [2.0, 3.0] * MIN_STEPS:
        score.add(loss)
    assert score.add(math.nan)[0] == math.inf and score.add(3.0)[0] == 1.0


@pytest.mark.parametrize(("loss", "is_spike"), [(3.0 + 6.9, 0), (3.0 + 7.1, 1), (3.0 - 7.1, 1)])
def test_a_spike_is_seven_deviations_above_or_below(loss: float, is_spike: int) -> None:
    score = SpikeScore()
    for value in [2.0, 4.0] * MIN_STEPS:  # the mean is 3, the deviation 1
        last = score.add(value)
    assert last is not None and last.score == 0.0
    spike = score.add(loss)
    assert spike is not None and spike.deviation == pytest.approx(loss - 3.0)
    assert spike.score == pytest.approx(is_spike / (MIN_STEPS + 1))


@pytest.mark.parametrize(
    ("busy_s", "slowest", "wait"),
    [([0.1, 0.4, 0.1], 1, 0.3), ([0.3, 0.1], 0, 0.2), ([0.1, 0.2, 0.3, 0.6], 3, 0.4)],
)
def test_the_others_wait_for_the_slowest_rank(
    busy_s: list[float], slowest: int, wait: float
) -> None:
    """Its busy time above the mean of the other ranks, as a share of the step before."""
    context = SimpleNamespace(device=torch.device("cpu"), heartbeat=SimpleNamespace(waited_s=0.0))
    ranks = SlowestRank(context, logs_all=True)
    first, second = report_of(1, step_time_s=0.8), report_of(2, step_time_s=0.5)
    ranks.begin()
    ranks.finish(first, [])
    assert first.slowest_rank is None and ranks.begin() == 0.8
    ranks.finish(second, busy_s)
    assert (second.slowest_rank, second.busy_s) == (slowest, busy_s)
    assert second.wait_for_slowest == pytest.approx(wait / 0.8)


def test_a_row_has_both_after_the_first_steps_however_often_it_is_read():
    spikes = SpikeScore()
    reports = [
        report_of(step, loss=2.0 + step % 2, spikes=spikes) for step in range(1, MIN_STEPS + 3)
    ]
    rows = [report.to_json() for report in reports]
    assert [report.to_json() for report in reports] == rows
    assert "spike_score" not in rows[MIN_STEPS - 1] and rows[-1]["spike_score"] == 0.0
    assert abs(rows[-1]["loss_deviation"]) == pytest.approx(1.0, abs=0.1)
