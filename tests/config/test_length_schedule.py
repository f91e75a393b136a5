"""Schedules of the sequence length that cannot be, each with its cure."""

import pytest

from nanotrain.config.config import Config, DataConfig, TrainConfig
from nanotrain.config.length_schedule import length_schedule
from nanotrain.config.load import load_config
from nanotrain.errors import ConfigError

RUN = ("--mock-data", "--vocab-size", "100", "--seq-length", "64", "--num-attention-heads", "4")


def lengths_of(schedule: str, *flags: str) -> tuple[tuple[int, int], ...]:
    steps = length_schedule(load_config([*RUN, "--step-seq-length-schedule", schedule, *flags]))
    assert steps is not None
    return steps.thresholds


def test_lengths_begin_at_their_thresholds_in_tokens_whatever_the_size_of_the_batch() -> None:
    assert lengths_of("0:16 1K:32, 2K:64") == ((0, 16), (15, 32), (31, 64))
    assert lengths_of("0:64") == ((0, 64),), "what is always so is accepted"
    batch = ("--step-batch-size-schedule", "0:4 1K:8")
    assert lengths_of("0:32 1K:64", *batch) == ((0, 32), (15, 64))
    assert length_schedule(load_config(RUN)) is None


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("0:16 x:64", "step_seq_length_schedule has 'x:64'"),
        ("0:0 1K:64", "the size above 0"),
        ("1K:16 2K:64", "must begin at 0"),
        ("0:16 9:64", "begins at 0, 0 samples"),
        ("0:32 1K:128", "set --seq-length 128"),
        ("0:16 1K:32", "end --step-seq-length-schedule with the length 64"),
        ("0:32 1K:16 2K:64", "each length must be above the previous one"),
        ("0:128 1K:64", "each length must be above the previous one"),
        ("0:24 1K:64", "has the length 24, which does not divide seq_length 64.*16 32"),
    ],
)
def test_a_schedule_that_cannot_be_is_an_error_with_the_cure(schedule: str, message: str) -> None:
    config = Config(data=DataConfig(seq_length=64), train=TrainConfig(step_seq_length_schedule=[schedule]))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        length_schedule(config)


def test_each_length_must_fit_the_layout_and_all_mistakes_are_one_error() -> None:
    cp = ("--context-parallel-size", "2", "--tensor-model-parallel-size", "4", "--sequence-parallel")
    with pytest.raises(ConfigError, match="the length 4 of step_seq_length_schedule cannot be split into 8 parts"):
        lengths_of("0:4 1K:32 2K:64", *cp)
    with pytest.raises(ConfigError) as caught:
        lengths_of("0:24 1K:64", *cp, "--lr", "-1")
    assert str(caught.value).count("step_seq_length_schedule has the length 24") == 1
    assert "--lr" in str(caught.value)
