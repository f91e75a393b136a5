"""The samples of a rank: a pure function of consumed samples and its data-parallel index.

    SamplerConfig        batch sizes and the index of a rank
    microbatch_samples   the samples of one microbatch
    all_microbatches     the samples of every microbatch

A global batch is samples [consumed, consumed + global_batch_size) in every topology; only the ranks
that read them differ:

    global batch of 12, micro batch 2, dp 2     microbatch 0 | microbatch 1 | microbatch 2
                                      dp rank 0       0  1   |       4  5   |       8  9
                                      dp rank 1       2  3   |       6  7   |      10 11

With a schedule of sequence lengths the samples are the same, and `data.batch.split_sequences`
splits each.

With a schedule of batch sizes the next size follows from the consumed samples too, so a run resumes
in the middle of a ramp-up, on any number of ranks.

If micro_batch_size * dp_size does not divide the global batch, the last microbatch of some ranks is
padding: it repeats the first sample without target tokens. The loss is a mean over target tokens,
and routers do not count padding (`Batch.is_padding`), so padding changes time, never values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nanotrain.config.schedules import BatchSchedule, Steps
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of


@dataclass(frozen=True)
class SamplerConfig:
    """A rank's data-parallel index and the batch sizes.

    Raises:
        ConfigError: the global batch has less than one microbatch per rank.
    """

    dp_rank: int  # index of this rank in its data-parallel group
    dp_size: int  # ranks of the data-parallel group
    micro_batch_size: int  # samples per microbatch of one rank
    global_batch_size: int  # samples per optimizer step over all ranks; a schedule's last size
    schedule: BatchSchedule | None = None  # the size of every batch; None for a constant size
    # the sequence length of every batch; None for the length of a sample
    lengths: Steps | None = None
    readers_per_sample: int = 1  # ranks that read the same sample
    # tokens of a sample on a rank that needs none of them; None where it reads them
    unread_length: int | None = None

    def __post_init__(self) -> None:
        """Check that the global batch has at least one microbatch per rank."""
        assert 0 <= self.dp_rank < self.dp_size, (
            f"dp rank {self.dp_rank} is outside a group of {self.dp_size}"
        )
        span = self.samples_per_round
        if self.global_batch_size < span:
            samples = count_of(self.global_batch_size, "sample")
            product = f"{self.micro_batch_size} x data-parallel size {self.dp_size}"
            raise ConfigError(
                f"a global batch of {samples} has less than one microbatch per rank",
                why=f"micro_batch_size {product} = {span}",
                fix=f"set --global-batch-size to at least {span}",
            )

    @property
    def samples_per_round(self) -> int:
        """Samples of one microbatch of every rank."""
        return self.micro_batch_size * self.dp_size

    @property
    def num_microbatches(self) -> int:
        """Microbatches per rank and global batch; with a schedule, for its last size."""
        return -(-self.global_batch_size // self.samples_per_round)

    @property
    def num_padded(self) -> int:
        """Padding samples of a global batch, over all ranks; with a schedule, for its last size."""
        return self.num_microbatches * self.samples_per_round - self.global_batch_size

    def size_at(self, consumed_samples: int) -> int:
        """Samples of the global batch that starts at `consumed_samples`."""
        return self.schedule.size_at(consumed_samples) if self.schedule else self.global_batch_size

    def length_at(self, consumed_samples: int) -> int | None:
        """Sequence length of the batch that starts at `consumed_samples`; None if constant."""
        return self.lengths.size_at(consumed_samples) if self.lengths else None

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Microbatches per rank of the global batch that starts at `consumed_samples`."""
        return -(-self.size_at(consumed_samples) // self.samples_per_round)


def microbatch_samples(
    config: SamplerConfig, *, consumed_samples: int, microbatch: int
) -> list[int]:
    """Sample indices of a microbatch of the global batch that follows `consumed_samples`.

    Padding is `~consumed_samples`, a negative index.

    >>> microbatch_samples(SamplerConfig(1, 2, 2, 12), consumed_samples=0, microbatch=1)
    [6, 7]
    >>> microbatch_samples(SamplerConfig(1, 2, 2, 11), consumed_samples=33, microbatch=2)
    [43, -34]
    """
    first = (microbatch * config.dp_size + config.dp_rank) * config.micro_batch_size
    size = config.size_at(consumed_samples)
    indices = []
    for position in range(first, first + config.micro_batch_size):
        is_padding = position >= size
        indices.append(~consumed_samples if is_padding else consumed_samples + position)
    return indices


def all_microbatches(config: SamplerConfig, consumed_samples: int) -> Iterator[list[int]]:
    """The sample indices of every microbatch of a rank from `consumed_samples` on, endlessly."""
    while True:
        for microbatch in range(config.num_microbatches_at(consumed_samples)):
            yield microbatch_samples(
                config, consumed_samples=consumed_samples, microbatch=microbatch
            )
        consumed_samples += config.size_at(consumed_samples)
