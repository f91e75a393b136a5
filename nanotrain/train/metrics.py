"""What is reported of a step: the result, the clock, the memory, and what follows from them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from nanotrain.comm.device import device_name, peak_memory
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.model.router_load import RouterLoad
from nanotrain.topology.counts import flops_per_token
from nanotrain.topology.hardware import peak_flops
from nanotrain.topology.shape import ModelShape
from nanotrain.train.run import TrainState
from nanotrain.train.step import StepResult


@dataclass
class StepReport:
    """One line of metrics.jsonl; hooks may add what they measured.

    Attributes:
        mfu: model FLOPs utilization, 0 to 1; None where the device's peak is unknown.
        peak_memory_bytes: most memory this rank held so far (tensors on a GPU, the process on a CPU).
        data_wait_s: part of `step_time_s` spent waiting for data.
        moe: what routers have chosen, over all ranks: `load` (choices per expert by router), and means over routers of
            `max_load` (busiest expert over an even share), `dropped`, `entropy`, `balance_loss` and `z_loss`; None for
            a dense model.
        valid_loss: set on steps that end with a validation.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    step_time_s: float
    tokens_per_second: float
    mfu: float | None
    peak_memory_bytes: int
    consumed_samples: int
    consumed_tokens: int
    skipped: bool
    data_wait_s: float
    loss_scale: float
    moe: dict[str, Any] | None = None
    valid_loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON: numbers that are not finite become null, and so does a validation that was not."""
        values = asdict(self)
        for absent in [name for name in ("valid_loss", "moe") if values[name] is None]:
            del values[absent]
        return {key: _finite(value) for key, value in values.items()}


@dataclass(frozen=True)
class Speedometer:
    """Turns times into rates.

    Attributes:
        tokens_per_step: tokens of a global batch, masked ones too: that is the work done.
        flops_per_token: forward and backward, as in `topology/counts.py`.
        peak_flops: of all ranks' devices together, per second; None where unknown.
    """

    tokens_per_step: int
    flops_per_token: int
    peak_flops: float | None

    @classmethod
    def of(cls, config: Config, context: ParallelContext, *, global_batch_size: int) -> "Speedometer":
        """The speedometer of a run."""
        peak = peak_flops(device_name(context.device), config.precision.params_dtype.value)
        seq_length = config.data.seq_length
        return cls(
            tokens_per_step=global_batch_size * seq_length,
            flops_per_token=flops_per_token(ModelShape.of(config.model), seq_length),
            peak_flops=peak * context.topology.world_size if peak else None,
        )

    def tokens_per_second(self, step_time_s: float) -> float:
        """Tokens of all ranks per second."""
        return self.tokens_per_step / step_time_s

    def mfu(self, tokens_per_second: float) -> float | None:
        """Achieved over possible arithmetic."""
        return tokens_per_second * self.flops_per_token / self.peak_flops if self.peak_flops else None


@dataclass(frozen=True)
class StepClock:
    """The times of one step in seconds."""

    step_time_s: float
    data_wait_s: float


def report_step(
    result: StepResult,
    state: TrainState,
    *,
    clock: StepClock,
    speed: Speedometer,
    context: ParallelContext,
    loss_scale: float,
) -> StepReport:
    """Everything that is known of a step when it ends."""
    rate = speed.tokens_per_second(clock.step_time_s)
    return StepReport(
        step=state.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        step_time_s=clock.step_time_s,
        tokens_per_second=rate,
        mfu=speed.mfu(rate),
        peak_memory_bytes=peak_memory(context.device),
        consumed_samples=state.consumed_samples,
        consumed_tokens=state.consumed_tokens,
        skipped=result.skipped,
        data_wait_s=clock.data_wait_s,
        loss_scale=loss_scale,
        moe=_describe_routers(result.router_loads),
    )


def _describe_routers(loads: Mapping[str, RouterLoad]) -> dict[str, Any] | None:
    if not loads:
        return None
    return {
        "load": {name: list(load.choices) for name, load in loads.items()},
        "max_load": fmean(load.max_load for load in loads.values()),
        "dropped": fmean(load.dropped_fraction for load in loads.values()),
        "entropy": fmean(load.entropy for load in loads.values()),
        "balance_loss": fmean(load.balance_loss for load in loads.values()),
        "z_loss": fmean(load.z_loss for load in loads.values()),
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
