"""Every sample of a global batch is read by exactly one rank, whatever the topology."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.config.schedules import Steps
from nanotrain.data.sampler import SamplerConfig, all_microbatches, microbatch_samples
from nanotrain.errors import ConfigError

SIZES = st.integers(1, 6)


@settings(deadline=None)
@given(dp_size=SIZES, micro=SIZES, microbatches=SIZES, consumed=st.integers(0, 10**12))
def test_ranks_together_read_the_global_batch_once(
    dp_size: int, micro: int, microbatches: int, consumed: int
) -> None:
    size = dp_size * micro * microbatches
    read: list[int] = []
    for rank in range(dp_size):
        config = SamplerConfig(rank, dp_size, micro, size)
        for microbatch in range(config.num_microbatches):
            read += microbatch_samples(config, consumed_samples=consumed, microbatch=microbatch)
    assert sorted(read) == list(range(consumed, consumed + size))


@settings(deadline=None)
@given(dp_size=SIZES, micro=SIZES, size=st.integers(36, 80), consumed=st.integers(0, 10**12))
def test_a_global_batch_that_does_not_divide_is_read_once_and_padded(
    dp_size: int, micro: int, size: int, consumed: int
) -> None:
    configs = [SamplerConfig(rank, dp_size, micro, size) for rank in range(dp_size)]
    read = [
        microbatch_samples(config, consumed_samples=consumed, microbatch=microbatch)
        for config in configs
        for microbatch in range(config.num_microbatches)
    ]
    samples = [index for microbatch in read for index in microbatch]
    assert sorted(index for index in samples if index >= 0) == list(
        range(consumed, consumed + size)
    )
    assert [index for index in samples if index < 0] == [~consumed] * configs[0].num_padded
    assert {len(microbatch) for microbatch in read} == {micro} and configs[
        0
    ].num_padded < dp_size * micro


@settings(deadline=None)
@given(dp_size=SIZES, micro=SIZES, microbatches=SIZES, steps=st.integers(0, 5))
def test_resuming_goes_on_exactly_where_the_run_stopped(
    dp_size: int, micro: int, microbatches: int, steps: int
) -> None:
    config = SamplerConfig(dp_size - 1, dp_size, micro, dp_size * micro * microbatches)
    uninterrupted = all_microbatches(config, 0)
    for _ in range(steps * config.num_microbatches):
        next(uninterrupted)
    resumed = all_microbatches(config, steps * config.global_batch_size)
    for _ in range(2 * config.num_microbatches):
        assert next(resumed) == next(uninterrupted)


def test_batches_of_a_schedule_follow_each_other_and_each_has_its_size() -> None:
    """Sizes 4, 4, 6, 8: of the third the second rank's last microbatch is padding."""
    schedule = Steps(((0, 4), (8, 6), (14, 8)))
    samplers = [all_microbatches(SamplerConfig(rank, 2, 2, 8, schedule), 0) for rank in range(2)]
    read = [[next(sampler) for _ in range(6)] for sampler in samplers]
    assert read[0] == [[0, 1], [4, 5], [8, 9], [12, 13], [14, 15], [18, 19]]
    assert read[1] == [[2, 3], [6, 7], [10, 11], [-9, -9], [16, 17], [20, 21]]


def test_microbatches_interleave_the_ranks() -> None:
    config = SamplerConfig(dp_rank=1, dp_size=2, micro_batch_size=2, global_batch_size=12)
    batches = all_microbatches(config, 24)
    assert [next(batches) for _ in range(4)] == [[26, 27], [30, 31], [34, 35], [38, 39]]


def test_ranks_without_a_sample_are_an_error_with_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"5 samples.*micro_batch_size 2 x data-parallel size 3 = 6.*at least 6"
    ):
        SamplerConfig(0, 3, 2, 5)
