"""`StepReport`: what hooks, console and metrics.jsonl report of a step. `Throughput`: tokens per second and MFU."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from nanotrain.comm.device import device_name, peak_memory
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.model.router_stats import RouterMetrics
from nanotrain.topology.hardware import peak_flops
from nanotrain.train.plans.plan import Plan
from nanotrain.train.run import TrainState
from nanotrain.train.step import StepResult

OPTIONAL = (
    "valid_loss",
    "valid_bits_per_byte",
    "moe",
    "decoupled_lr",
    "save_stall_s",
    "failed_saves",
    "slowest_rank",
    "slowest_share",
)


@dataclass
class StepReport:
    """One line of metrics.jsonl; the evaluation hook sets `valid_loss`."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    step_time_s: float
    tokens_per_second: float
    mfu: float | None  # model FLOPs utilization, 0 to 1; None if the peak of the device is unknown
    peak_memory_bytes: int  # peak of this rank so far (allocated tensors on a GPU, the process on a CPU)
    global_batch_size: int  # samples of this step
    consumed_samples: int
    consumed_tokens: int
    skipped: bool
    data_wait_s: float  # part of `step_time_s` spent waiting for data
    loss_scale: float
    # routing statistics over all ranks: `load` (tokens per expert by router), and means over routers of `max_load`
    # (busiest expert relative to the mean), `dropped`, `entropy`, `balance_loss` and `z_loss`; None for a dense model
    moe: dict[str, Any] | None = None
    decoupled_lr: float | None = None  # learning rate of the embedding and the output layer; None where it is `lr`
    valid_loss: float | None = None  # set on steps that end with a validation
    valid_bits_per_byte: float | None = None  # of the same samples; None where the bytes of tokens are unknown
    # of the step before: the rank that waited least for others, and the share of the step time in which it did not.
    # None on one rank and on GPUs, where the host does not wait
    slowest_rank: int | None = None
    slowest_share: float | None = None
    save_stall_s: float | None = None  # time for which saving blocked this rank since the last row; None without
    failed_saves: int | None = None  # checkpoints of the run that could not be written so far; None without

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON; numbers that are not finite become null, unset ones of `OPTIONAL` are left out."""
        values = asdict(self)
        for absent in [name for name in OPTIONAL if values[name] is None]:
            del values[absent]
        return {key: _finite(value) for key, value in values.items()}


@dataclass(frozen=True)
class Throughput:
    """Rates of a run from step times."""

    tokens_per_sample: int  # masked tokens included
    flops_per_token: int  # forward and backward
    peak_flops: float | None  # per second, of all devices together; None if unknown

    @classmethod
    def of(cls, plan: Plan, context: ParallelContext) -> "Throughput":
        """The rates of a planned run on this device."""
        precision = plan.config.precision
        # With fp8 a lower bound: attention, embedding, head and router are not in fp8 and counted against its peak.
        dtype = precision.params_dtype.value if precision.fp8_format is None else "fp8"
        peak = peak_flops(device_name(context.device), dtype)
        return cls(
            tokens_per_sample=plan.config.data.seq_length,
            flops_per_token=plan.flops_per_token,
            peak_flops=peak * plan.topology.world_size if peak else None,
        )

    def tokens_per_second(self, num_samples: int, step_time_s: float) -> float:
        """Tokens of all ranks per second, in a step of that many samples."""
        return num_samples * self.tokens_per_sample / step_time_s

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilization: achieved FLOPs relative to the peak."""
        return tokens_per_second * self.flops_per_token / self.peak_flops if self.peak_flops else None


@dataclass(frozen=True)
class StepClock:
    """Times of one step in seconds."""

    step_time_s: float
    data_wait_s: float


def report_step(
    result: StepResult,
    state: TrainState,
    *,
    clock: StepClock,
    throughput: Throughput,
    context: ParallelContext,
    loss_scale: float,
) -> StepReport:
    """The report of a finished step."""
    rate = throughput.tokens_per_second(result.num_samples, clock.step_time_s)
    return StepReport(
        step=state.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        step_time_s=clock.step_time_s,
        tokens_per_second=rate,
        mfu=throughput.mfu(rate),
        peak_memory_bytes=peak_memory(context.device),
        global_batch_size=result.num_samples,
        consumed_samples=state.consumed_samples,
        consumed_tokens=state.consumed_tokens,
        skipped=result.skipped,
        data_wait_s=clock.data_wait_s,
        loss_scale=loss_scale,
        moe=_describe_routers(result.router_metrics),
        decoupled_lr=result.decoupled_lr,
    )


def _describe_routers(routers: Mapping[str, RouterMetrics]) -> dict[str, Any] | None:
    if not routers:
        return None
    return {
        "load": {name: list(router.tokens_per_expert) for name, router in routers.items()},
        "max_load": fmean(router.max_over_mean for router in routers.values()),
        "dropped": fmean(router.dropped_fraction for router in routers.values()),
        "entropy": fmean(router.entropy for router in routers.values()),
        "balance_loss": fmean(router.aux_loss for router in routers.values()),
        "z_loss": fmean(router.z_loss for router in routers.values()),
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
