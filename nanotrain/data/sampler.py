"""Which samples a rank reads: a pure function of consumed samples and the rank's place.

A global batch is samples [consumed, consumed + global_batch_size) in every topology; only who reads what differs:

    global batch of 12, micro batch 2, dp 2     microbatch 0 | microbatch 1 | microbatch 2
                                      dp rank 0       0  1   |       4  5   |       8  9
                                      dp rank 1       2  3   |       6  7   |      10 11
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nanotrain.errors import ConfigError


@dataclass(frozen=True)
class SamplerConfig:
    """Where a rank stands among the readers, and how a global batch is cut.

    Args:
        dp_rank: index of this rank in its data-parallel group.
        dp_size: ranks of the data-parallel group.
        micro_batch_size: samples one rank passes through the model at once.
        global_batch_size: samples of one optimizer step over all ranks.

    Raises:
        ConfigError: the global batch is not a whole number of microbatches on every rank.
    """

    dp_rank: int
    dp_size: int
    micro_batch_size: int
    global_batch_size: int

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_size, f"dp rank {self.dp_rank} of {self.dp_size} reads nobody's samples"
        span = self.micro_batch_size * self.dp_size
        if self.global_batch_size % span:
            raise ConfigError(
                f"a global batch of {self.global_batch_size} samples cannot be cut into microbatches",
                why=f"micro_batch_size {self.micro_batch_size} x data-parallel size {self.dp_size} = {span} "
                "must divide it",
                fix=f"set --global-batch-size to a multiple of {span}",
            )

    @property
    def num_microbatches(self) -> int:
        """Microbatches each rank reads per global batch."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)


def microbatch_samples(place: SamplerConfig, *, consumed_samples: int, microbatch: int) -> range:
    """The numbers of the samples of one microbatch.

    Args:
        place: the reading rank.
        consumed_samples: samples all ranks have read before this global batch.
        microbatch: which microbatch of the global batch.

    >>> microbatch_samples(SamplerConfig(1, 2, 2, 12), consumed_samples=0, microbatch=1)
    range(6, 8)
    """
    first = consumed_samples + (microbatch * place.dp_size + place.dp_rank) * place.micro_batch_size
    return range(first, first + place.micro_batch_size)


@dataclass(frozen=True)
class MicrobatchSampler:
    """Every microbatch of a rank from `consumed_samples` on, without end, as lists of sample numbers."""

    place: SamplerConfig
    consumed_samples: int

    def __iter__(self) -> Iterator[list[int]]:
        consumed = self.consumed_samples
        while True:
            for microbatch in range(self.place.num_microbatches):
                yield list(microbatch_samples(self.place, consumed_samples=consumed, microbatch=microbatch))
            consumed += self.place.global_batch_size
