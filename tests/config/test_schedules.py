"""Batch sizes by consumed samples, against numbers of Megatron-LM's own calculators; lengths that
cannot be.
"""

from itertools import accumulate, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.config import Config, DataConfig, TrainConfig
from nanotrain.config.load import load_config
from nanotrain.config.schedules import (
    batch_sizes,
    global_batch_size,
    length_schedule,
    num_microbatches,
    read_ramp_up,
    read_steps,
    samples_of_steps,
    steps_of_samples,
)
from nanotrain.errors import ConfigError

RUN = ("--mock-data", "--vocab-size", "100", "--seq-length", "16")


def test_the_ramp_up_of_gpt_3_175b_has_the_sizes_of_megatron_lm() -> None:
    ramp = read_ramp_up([16, 16, 5_859_375], final=1536)
    sizes = {
        0: 16,
        61_677: 16,
        61_678: 32,
        1_000_000: 272,
        5_859_374: 1520,
        5_859_375: 1536,
        5_859_376: 1536,
    }
    assert {consumed: ramp.size_at(consumed) for consumed in sizes} == sizes


def test_a_ramp_up_ends_after_the_batch_that_passes_its_samples() -> None:
    sizes = batch_sizes(read_ramp_up([4, 4, 30], final=12))
    assert [next(sizes) for _ in range(8)] == [4, 4, 4, 4, 8, 8, 12, 12]


def test_steps_begin_at_their_thresholds_in_tokens() -> None:
    steps = read_steps(["0:768 250B:1536,", "500B:3072"], seq_length=4096)
    assert steps.sizes == (768, 1536, 3072)
    assert [steps.size_at(250_000_000_000 // 4096 + offset) for offset in (-1, 0)] == [768, 1536]


@given(
    values=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 400)),
    increments=st.integers(1, 9),
    num_steps=st.integers(0, 80),
)
def test_steps_and_samples_are_counted_alike(
    values: tuple[int, int, int], increments: int, num_steps: int
) -> None:
    ramp = read_ramp_up(list(values), final=values[0] + increments * values[1])
    sizes = batch_sizes(ramp)
    samples = sum(next(sizes) for _ in range(num_steps))
    assert samples_of_steps(ramp, num_steps) == samples
    # within the ramp-up Megatron-LM counts the batch that passes the end, later none
    if samples > values[2]:
        assert (
            steps_of_samples(ramp, samples)
            == steps_of_samples(ramp, samples + ramp.final - 1)
            == num_steps
        )


def test_train_samples_give_the_steps_of_the_schedule_and_the_length_of_the_decay() -> None:
    ramp = (
        "--rampup-batch-size",
        "4",
        "4",
        "30",
        "--global-batch-size",
        "12",
        "--train-samples",
        "100",
    )
    config = load_config([*RUN, *ramp])
    # 32 samples in six steps, then five of twelve; 8 are left out
    assert config.train.train_iters == 6 + 5
    assert config.optim.lr_decay_samples == 100
    steps = ("--step-batch-size-schedule", "0:4 512:8", "--train-samples", "100")
    # 32 in eight, then nine of eight, past the end
    assert load_config([*RUN, *steps]).train.train_iters == 8 + 9


@pytest.mark.parametrize(
    ("flags", "iters", "samples"),
    [
        ("--lr-decay-iters 5", 5, None),
        ("--lr-decay-samples 50", None, 50),
        ("--lr-decay-style constant", None, None),
        ("--lr-decay-style constant --lr-warmup-fraction 0.1", None, 100),
    ],
)
def test_a_length_of_the_decay_on_the_line_counts_beside_train_samples(
    flags: str, iters: int | None, samples: int | None
) -> None:
    line = f"--global-batch-size 4 --train-samples 100 {flags}"
    optim = load_config([*RUN, *line.split()]).optim
    assert (optim.lr_decay_iters, optim.lr_decay_samples) == (iters, samples)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rampup-batch-size 4 4", "takes three numbers"),
        ("--rampup-batch-size 4 4 30", "global_batch_size is unset"),
        (
            "--rampup-batch-size 8 8 1e18 --global-batch-size 80",
            "it has at most 10,000 increments over",
        ),
        (
            "--rampup-batch-size 8 1 99 --global-batch-size 60000",
            "lower SAMPLES or raise INCREMENT",
        ),
        (
            "--rampup-batch-size 4 3 30 --global-batch-size 12",
            "does not end at global_batch_size 12",
        ),
        (
            "--rampup-batch-size 12 4 30 --global-batch-size 12",
            "does not end at global_batch_size 12",
        ),
        ("--rampup-batch-size 4 4 0 --global-batch-size 12", "must be at least 1"),
        (
            "--rampup-batch-size 3 3 30 --global-batch-size 12 --micro-batch-size 2",
            "3 samples of --rampup-batch-size",
        ),
        ("--step-batch-size-schedule 0:4 x:8", "has 'x:8'"),
        ("--step-batch-size-schedule 10K:4 20K:8", "must begin at 0"),
        ("--step-batch-size-schedule 0:4 5:8", "begins at 0, 0 samples"),
        (
            "--step-batch-size-schedule 0:4 1K:8 --global-batch-size 6",
            "and global_batch_size 6 is set",
        ),
        (
            "--step-batch-size-schedule 0:4 --rampup-batch-size 1 1 9",
            "and rampup_batch_size is set",
        ),
        (
            "--lr-decay-style WSD --lr-decay-samples 10 --lr-wsd-decay-samples 11",
            "longer than the schedule",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_an_error_with_the_cure(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([*RUN, *flags.split()])


def test_steps_may_fall_and_are_counted_alike() -> None:
    steps = read_steps(["0:7", "116:7", "121:4", "195:16"], seq_length=1)
    samples = [0, *accumulate(islice(batch_sizes(steps), 60))]
    assert [samples_of_steps(steps, number) for number in range(61)] == samples
    assert [steps_of_samples(steps, number) for number in samples] == [*range(61)]


def test_a_global_batch_is_cut_into_whole_microbatches() -> None:
    train = TrainConfig(micro_batch_size=2, global_batch_size=24)
    assert [num_microbatches(train, dp) for dp in (1, 2, 3, 4, 5, 12)] == [12, 6, 4, 3, 3, 1]
    with pytest.raises(
        ConfigError,
        match="micro_batch_size 2 x data-parallel size 13 = 26; .* --global-batch-size 26",
    ):
        num_microbatches(train, 13)
    with pytest.raises(
        ConfigError, match="micro_batch_size 5 must divide it; set --global-batch-size 30"
    ):
        num_microbatches(TrainConfig(micro_batch_size=5, global_batch_size=24), 2)


def test_an_unset_global_batch_is_one_microbatch_a_rank() -> None:
    train = TrainConfig(micro_batch_size=3)
    assert global_batch_size(train, 5) == 15 and num_microbatches(train, 5) == 1


LENGTH_RUN = (
    "--mock-data",
    "--vocab-size",
    "100",
    "--seq-length",
    "64",
    "--num-attention-heads",
    "4",
)


def lengths_of(schedule: str, *flags: str) -> tuple[tuple[int, int], ...]:
    steps = length_schedule(
        load_config([*LENGTH_RUN, "--step-seq-length-schedule", schedule, *flags])
    )
    assert steps is not None
    return steps.thresholds


def test_lengths_begin_at_their_thresholds_in_tokens_whatever_the_size_of_the_batch() -> None:
    assert lengths_of("0:16 1K:32, 2K:64") == ((0, 16), (15, 32), (31, 64))
    assert lengths_of("0:64") == ((0, 64),), "a schedule of one length is accepted"
    batch = ("--step-batch-size-schedule", "0:4 1K:8")
    assert lengths_of("0:32 1K:64", *batch) == ((0, 32), (15, 64))
    assert length_schedule(load_config(LENGTH_RUN)) is None


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
def test_a_schedule_of_lengths_that_cannot_be_is_an_error_with_the_cure(
    schedule: str, message: str
) -> None:
    config = Config(
        data=DataConfig(seq_length=64), train=TrainConfig(step_seq_length_schedule=[schedule])
    )
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        length_schedule(config)


def test_each_length_must_fit_the_layout_and_all_mistakes_are_one_error() -> None:
    cp = (
        "--context-parallel-size",
        "2",
        "--tensor-model-parallel-size",
        "4",
        "--sequence-parallel",
    )
    with pytest.raises(
        ConfigError, match="the length 4 of step_seq_length_schedule cannot be split into 8 parts"
    ):
        lengths_of("0:4 1K:32 2K:64", *cp)
    with pytest.raises(ConfigError) as caught:
        lengths_of("0:24 1K:64", *cp, "--lr", "-1")
    assert str(caught.value).count("step_seq_length_schedule has the length 24") == 1
    assert "--lr" in str(caught.value)
