"""Time of one training step, split by what it is spent on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Something that runs on a stream of a pipeline rank."""

    name: str  # "F0.3", "grads 2"
    stream: str  # compute, pp, dp
    start: float
    end: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of the slowest pipeline rank."""

    compute: float  # operators of forward and backward
    exposed: Mapping[str, float]  # communication that does not overlap with computation, by group: tp, cp, ep, pp, dp
    bubble: float  # waiting for other pipeline ranks
    optimizer: float  # update of the parameters
    data: float  # loading of the batch
    host: float  # waiting for the host to launch operators
    low: float  # least total that is likely
    high: float  # largest total that is likely
    tokens: int  # of the global batch
    world_size: int  # ranks of the run
    flops_per_token: int  # FLOPs of the model
    peak_flops: float  # of a GPU in bf16
    spans: tuple[tuple[Span, ...], ...] = ()  # timeline of every pipeline rank

    @property
    def total(self) -> float:
        """Seconds of the step."""
        parts = (self.compute, self.bubble, self.optimizer, self.data, self.host)
        return sum(parts) + sum(self.exposed.values())

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput."""
        return self.tokens / self.total / self.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.tokens_per_s_per_gpu * self.flops_per_token / self.peak_flops
