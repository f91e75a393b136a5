"""Which samples a rank reads: a pure function of the consumed samples and the rank's data-parallel
index.

A global batch is samples [consumed, consumed + global_batch_size) in every topology; only the
reader of each differs:

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
    global_batch_size: int  # samples per optimizer step over all ranks; of a schedule the last size
    schedule: BatchSchedule | None = None  # the size of each batch; None where it is constant
    # the sequence length of each batch; None where it is that of a sample
    lengths: Steps | None = None
    readers_per_sample: int = 1  # ranks that read the same sample
    # tokens of a sample on a rank that needs none of them; None where it reads them
    unread_length: int | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_size, (
            f"dp rank {self.dp_rank} is outside a group of {self.dp_size}"
        )
        span = self.micro_batch_size * self.dp_size
        if self.global_batch_size < span:
            raise ConfigError(
                f"a global batch of {count_of(self.global_batch_size, 'sample')} has less than one microbatch per rank",
                why=f"micro_batch_size {self.micro_batch_size} x data-parallel size {self.dp_size} = {span}",
                fix=f"set --global-batch-size to at least {span}",
            )

    @property
    def num_microbatches(self) -> int:
        """Microbatches per rank and global batch; of a schedule those of its last size."""
        return -(-self.global_batch_size // (self.micro_batch_size * self.dp_size))

    @property
    def num_padded(self) -> int:
        """Samples of a global batch, over all ranks, that are padding; of a schedule those of its
        last size.
        """
        return self.num_microbatches * self.micro_batch_size * self.dp_size - self.global_batch_size

    def size_at(self, consumed_samples: int) -> int:
        """Samples of the global batch that starts at `consumed_samples`."""
        return self.schedule.size_at(consumed_samples) if self.schedule else self.global_batch_size

    def length_at(self, consumed_samples: int) -> int | None:
        """Sequence length of the global batch that starts at `consumed_samples`; None for that of a
        sample.
        """
        return self.lengths.size_at(consumed_samples) if self.lengths else None

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Microbatches per rank of the global batch that starts at `consumed_samples`."""
        return -(-self.size_at(consumed_samples) // (self.micro_batch_size * self.dp_size))


def microbatch_samples(
    config: SamplerConfig, *, consumed_samples: int, microbatch: int
) -> list[int]:
    """Sample indices of microbatch number `microbatch` of the global batch that follows
    `consumed_samples`.

    Padding is `~consumed_samples`, a negative index.

    >>> microbatch_samples(SamplerConfig(1, 2, 2, 12), consumed_samples=0, microbatch=1)
    [6, 7]
    >>> microbatch_samples(SamplerConfig(1, 2, 2, 11), consumed_samples=33, microbatch=2)
    [43, -34]
    """
    first = (microbatch * config.dp_size + config.dp_rank) * config.micro_batch_size
    positions, size = (
        range(first, first + config.micro_batch_size),
        config.size_at(consumed_samples),
    )
    return [
        consumed_samples + position if position < size else ~consumed_samples
        for position in positions
    ]


def all_microbatches(config: SamplerConfig, consumed_samples: int) -> Iterator[list[int]]:
    """The sample indices of every microbatch of a rank from `consumed_samples` on, without an end."""
    while True:
        for microbatch in range(config.num_microbatches_at(consumed_samples)):
            yield microbatch_samples(
                config, consumed_samples=consumed_samples, microbatch=microbatch
            )
        consumed_samples += config.size_at(consumed_samples)
