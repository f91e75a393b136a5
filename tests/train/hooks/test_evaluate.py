"""Validation: when it runs, what it computes, and that it leaves training as it is."""

import math

import pytest
import torch

from nanotrain.train.hooks.evaluate import EvaluateHook, evaluate
from tests.train.small_run import Spy, small_run, train

EVERY_TWO = ("--eval-interval", "2", "--eval-iters", "3")


def test_it_runs_before_the_first_step_at_every_interval_and_after_the_last(tmp_path, logged):
    spy = Spy()
    with small_run(tmp_path, "--train-iters", "5", *EVERY_TWO) as run:
        train(run, EvaluateHook(), spy)
    assert [report.step for report in spy.reports if report.valid_loss is not None] == [2, 4, 5]
    assert sum("validation loss before training" in line for line in logged) == 1


def test_the_loss_is_the_mean_over_the_first_batches_of_the_validation_split(tmp_path):
    with small_run(tmp_path, *EVERY_TWO, "--global-batch-size", "2") as run:
        losses = [evaluate(run), evaluate(run)]
        samples = [run.inputs.datasets.valid[number] for number in range(3 * 2)]
        (stage,) = run.stages.values()
        by_hand = [
            torch.nn.functional.cross_entropy(
                stage.logits(torch.from_numpy(sample.tokens)[None])[0].detach().float(), torch.from_numpy(sample.labels)
            ).item()
            for sample in samples
        ]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)


def test_the_sum_over_many_batches_is_not_rounded(tmp_path, monkeypatch):
    losses = iter([2.0**26, 1.0, 1.0])
    monkeypatch.setattr("nanotrain.train.hooks.evaluate.run_forward", lambda *_, **__: torch.tensor(next(losses)))
    with small_run(tmp_path, *EVERY_TWO) as run:
        num_tokens = 3 * run.config.train.global_batch_size * run.config.data.seq_length
        assert evaluate(run) == (2.0**26 + 2) / num_tokens


def test_validation_changes_nothing_of_the_training(tmp_path):
    losses = []
    for arguments in ((), EVERY_TWO):
        spy = Spy()
        with small_run(tmp_path / str(len(arguments)), "--train-iters", "5", *arguments) as run:
            train(run, *([EvaluateHook()] if arguments else []), spy)
        losses.append([report.loss for report in spy.reports])
    assert losses[0] == losses[1]


def test_a_signal_ends_a_validation_between_two_batches(tmp_path):
    with small_run(tmp_path, *EVERY_TWO) as run:
        run.stop.signal = 15
        assert evaluate(run) is None


def test_bits_per_byte_follow_from_the_loss_where_the_tokenizer_is_local(tmp_path):
    spy = Spy()
    with small_run(tmp_path, "--train-iters", "2", *EVERY_TWO) as run:
        train(run, EvaluateHook("bytes"), spy)
        samples = [run.inputs.datasets.valid[number] for number in range(3)]
    labels = torch.cat([torch.from_numpy(sample.labels) for sample in samples])
    report, num_bytes = spy.reports[-1], int((labels < 256).sum())  # the vocabulary of 260 has four other tokens
    assert 0 < num_bytes < len(labels)
    assert report.valid_bits_per_byte == pytest.approx(report.valid_loss * len(labels) / math.log(2) / num_bytes)
